// The kernels of csrc/ without Python: `kernels_test [set...]` runs the named sets of cases (all without a name) against plain loops in
// double precision, prints a digest of the bits of all results, and exits 0; on the first failure it says what failed and exits 1.
// `kernels_test features` prints the processor's flags that the builds ask for.
#include <string>

#include "check.h"
#include "cpu_features.h"

namespace {

struct Set {
  const char* name;
  void (*run)(native_test::Digest&);
};

constexpr Set kSets[] = {
    {"simd", native_test::simd_cases},           {"row", native_test::row_cases},           {"linear", native_test::linear_cases},
    {"attention", native_test::attention_cases}, {"sampling", native_test::sampling_cases}, {"pool", native_test::pool_cases},
    {"program", native_test::program_cases},
};

bool run(const std::string& name, native_test::Digest& digest) {
  for (const Set& set : kSets)
    if (name == set.name) {
      set.run(digest);
      std::printf("passed %s\n", set.name);
      return true;
    }
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> names(argv + 1, argv + argc);
  if (names == std::vector<std::string>{"features"}) {
    for (const std::string& flag : kvist_cpu_features()) std::printf("%s\n", flag.c_str());
    return 0;
  }
  if (names.empty())
    for (const Set& set : kSets) names.emplace_back(set.name);
  native_test::Digest digest;
  for (const std::string& name : names) native_test::check(run(name, digest), "there is no set of cases named %s", name.c_str());
  std::printf("digest %016llx\n", static_cast<unsigned long long>(digest.value()));
  return 0;
}
