#include "cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

std::vector<std::string> kvist_cpu_features() {
  std::vector<std::string> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const auto note = [&](bool present, const char* name) {
    if (present) found.emplace_back(name);
  };
  note(__builtin_cpu_supports("avx2"), "avx2");
  note(__builtin_cpu_supports("fma"), "fma");
  unsigned a, b, c, d;
  note(__get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C), "f16c");  // older compilers have no name for it
  note(__builtin_cpu_supports("avx512f"), "avx512f");
  note(__builtin_cpu_supports("avx512bw"), "avx512bw");
  note(__builtin_cpu_supports("avx512dq"), "avx512dq");
  note(__builtin_cpu_supports("avx512vl"), "avx512vl");
  note(__builtin_cpu_supports("avx512vnni"), "avx512vnni");
  note(__builtin_cpu_supports("avx512bf16"), "avx512bf16");
  // What no flag tells: AMD's cores start a 16-bit dot product of 512 bits each cycle, Intel's every other, where f32 products are as fast.
  note(__builtin_cpu_supports("avx512bf16") && __builtin_cpu_is("amd"), "fast_bf16_dot");
#endif
  return found;
}
