"""The kernels of csrc/ without Python, under the sanitizers, and the AVX-512 source on processors without AVX-512.

`kernels_test.cpp` and its sets of cases are compiled with the sources once a build, as one translation unit because headers cost
more than the code. Every build must pass all cases with no report of a sanitizer. The AVX-512 source runs on plain definitions of
its intrinsics (`avx512_emulated.h`), and the digest of all results must be that of the AVX2 build: the two are equal bit for bit.
What a compiler makes of it is run by `emulator/`.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvist.kernels.cpu import REQUIRED_FLAGS

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
MODULE_ONLY = "module"
SETS = ("simd", "row", "linear", "attention", "sampling", "pool", "program")
COMMON = ("-std=gnu++20", "-O1", "-g1", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi")

AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
EMULATED = ("-include", str(HERE / "avx512_emulated.h"))
DOTS = "-DKVIST_BF16_DOT"
DOT_SETS = ("simd", "attention")
DOT_SOURCES = {"attention", "bf16_dot", "elementwise", "thread_pool", "simd_cases", "attention_cases"}
DOT_MAIN = """
int main() {
  native_test::Digest digest;
  native_test::simd_cases(digest);
  native_test::attention_cases(digest);
  std::printf("passed simd\\npassed attention\\ndigest %016llx\\n", static_cast<unsigned long long>(digest.value()));
}
"""
BUILDS = {
    "portable": ("-DKVIST_PORTABLE",),
    "portable without SSE2": ("-DKVIST_PORTABLE", "-U__SSE2__"),
    "avx2": ("-DKVIST_AVX2", *AVX2),
    "avx512": ("-DKVIST_AVX512", *AVX2, *AVX512),
    "avx512 emulated": ("-DKVIST_AVX512", *AVX2, *EMULATED),
    "avx512bf16": ("-DKVIST_AVX512", DOTS, *AVX2, *AVX512, "-mavx512bf16"),
    "avx512bf16 emulated": ("-DKVIST_AVX512", DOTS, *AVX2, *EMULATED, "-O0"),
    "avx512bf16 defined": ("-DKVIST_AVX2", DOTS, *AVX2),
}
"""Without SSE2 the portable source takes the way of processors of other kinds, as plain loops. 16-bit dot products are defined by
plain operations of AVX2."""

ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O0")
"""Not optimized: that compiles in half the time, and no error vanishes before it is seen."""

THREAD = ("-fsanitize=thread",)

FRESH_MEMORY_IS_NAN = "ASAN_OPTIONS=max_malloc_fill_size=1000000000:malloc_fill_byte=255"
ONE_RACE_IS_ENOUGH = "TSAN_OPTIONS=halt_on_error=1"
PLAIN = ("env", FRESH_MEMORY_IS_NAN, ONE_RACE_IS_ENOUGH)
RUNNERS = (PLAIN, ("env", f"{FRESH_MEMORY_IS_NAN}:detect_leaks=0"), ("setarch", "-R", *PLAIN))
"""Ways to start a program: some containers forbid what the leak checker needs, some kernels place memory where GCC's race
detector cannot follow."""

PROBES = {
    ADDRESS: (
        "heap-buffer-overflow",
        "#include <cstring>\n"
        "int main(int n, char**) { char* p = new char[1]; std::memset(p, 0, n); int v = *p; delete[] p; return v; }",
    ),
    THREAD: (
        "data race",
        "#include <thread>\nint v; int main(int n, char**) { std::thread t([] { ++v; }); if (n > 1) ++v; t.join(); return v - n; }",
    ),
}
"""For each sanitizer a program that is right without an argument and wrong with one, and what the report then says."""


@dataclass(frozen=True)
class Outcome:
    passed: tuple[str, ...]
    digest: str


def run(*command: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=900)


class Workshop:
    """Compiles each program once, in a folder of its own."""

    def __init__(self, folder: Path, compiler: str) -> None:
        self._folder, self._compiler = folder, compiler
        self.program = functools.cache(self._program)
        self.runner = functools.cache(self._runner)

    def _compile(self, source: str, *flags: str) -> tuple[str, str]:
        """The program's path, and the compiler's complaint if it failed."""
        path = str(self._folder / f"program{len(list(self._folder.iterdir()))}")
        done = run(self._compiler, *COMMON, *flags, "-x", "c++", "-", "-o", path, stdin=source)
        return path, done.stderr if done.returncode else ""

    def _runner(self, sanitizer: tuple[str, ...]) -> tuple[str, ...] | None:
        """How to start programs under a sanitizer; None if it is not installed or does not run here."""
        if not sanitizer:
            return ()
        report, source = PROBES[sanitizer]
        path, complaint = self._compile(source, *sanitizer)
        if complaint:
            return None
        for runner in RUNNERS:
            if not shutil.which(runner[0]):
                continue
            if run(*runner, path).returncode == 0:
                wrong = run(*runner, path, "wrong")
                assert wrong.returncode != 0, sanitizer
                assert report in wrong.stderr
                return runner
        return None

    def _program(self, *flags: str) -> str:
        sources = [path for path in (*CSRC.glob("*.cpp"), *HERE.glob("*.cpp")) if not path.name.startswith(MODULE_ONLY)]
        if DOTS in flags:
            sources = [path for path in sources if path.stem in DOT_SOURCES]
        text = "".join(f'#include "{path}"\n' for path in sorted(sources)) + (DOT_MAIN if DOTS in flags else "")
        path, complaint = self._compile(text, "-DKVIST_NAMESPACE=kvist_native", f"-I{CSRC}", f"-I{HERE}", *flags)
        assert not complaint, complaint
        return path

    @functools.cached_property
    def cpu(self) -> frozenset[str]:
        """Flags of this processor. Asks the portable build, in the form in which it is tested anyway."""
        return frozenset(self.start("portable", "features", sanitizer=self.sanitizer(ADDRESS)).split())

    def sanitizer(self, wanted: tuple[str, ...]) -> tuple[str, ...]:
        """The sanitizer where it runs, or none: bits are the same."""
        return () if self.runner(wanted) is None else wanted

    def start(self, build: str, *words: str, sanitizer: tuple[str, ...] = ()) -> str:
        runner = self.runner(sanitizer)
        assert runner is not None
        done = run(*runner, self.program(*BUILDS[build], *sanitizer), *words)
        assert done.returncode == 0, done.stderr + done.stdout
        assert not done.stderr
        return done.stdout

    def check(self, build: str, sanitizer: tuple[str, ...] = ()) -> Outcome:
        """Runs all sets of cases that the build has."""
        output = self.start(build, sanitizer=sanitizer)
        digest = re.search(r"^digest ([0-9a-f]{16})$", output, re.MULTILINE)
        assert digest, output
        return Outcome(tuple(re.findall(r"^passed (\w+)$", output, re.MULTILINE)), digest[1])

    def needs(self, sanitizer: tuple[str, ...]) -> None:
        if self.runner(sanitizer) is None:
            pytest.skip(f"g++ has no runtime here for {sanitizer[0]}, or its programs do not start")

    def needs_cpu(self, isa: str) -> None:
        missing = sorted(set(REQUIRED_FLAGS[isa]) - self.cpu)
        if missing:
            pytest.skip(f"this processor lacks {', '.join(missing)}")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("native")
    yield Workshop(folder, compiler)
    shutil.rmtree(folder)


@pytest.mark.parametrize("build", ["portable", "avx2"])
def test_kernels_hold_under_address_and_undefined_sanitizers(workshop: Workshop, build: str) -> None:
    workshop.needs(ADDRESS)
    workshop.needs_cpu(build)
    assert workshop.check(build, ADDRESS).passed == SETS


def test_threads_do_not_race_and_plain_loops_have_the_bits_of_sse2(workshop: Workshop) -> None:
    workshop.needs(THREAD)
    outcome = workshop.check("portable without SSE2", THREAD)
    assert outcome.passed == SETS
    assert outcome == workshop.check("portable", workshop.sanitizer(ADDRESS))


def test_avx512_has_the_bits_of_avx2(workshop: Workshop) -> None:
    workshop.needs_cpu("avx2")
    sanitizer = workshop.sanitizer(ADDRESS)
    emulated = workshop.check("avx512 emulated", sanitizer)
    assert emulated.passed == SETS
    assert emulated == workshop.check("avx2", sanitizer)


@pytest.mark.parametrize("build", ["avx512", "avx512bf16"])
def test_a_processor_with_avx512_agrees_with_its_emulation(workshop: Workshop, build: str) -> None:
    workshop.needs_cpu(build)
    assert workshop.check(build) == workshop.check(f"{build} emulated", workshop.sanitizer(ADDRESS))


def test_16_bit_dot_products_have_the_bits_of_their_definition(workshop: Workshop) -> None:
    """The way to memory is the same in both, so one of them under the sanitizers is enough."""
    workshop.needs_cpu("avx2")
    defined = workshop.check("avx512bf16 defined", workshop.sanitizer(ADDRESS))
    assert defined.passed == DOT_SETS
    assert defined == workshop.check("avx512bf16 emulated")


def test_every_intrinsic_of_avx512_is_emulated() -> None:
    used = set(re.findall(r"_mm512_\w+", "".join(path.read_text(encoding="utf-8") for path in CSRC.iterdir())))
    defined = set(re.findall(r"#define (_mm512_\w+)", (HERE / "avx512_emulated.h").read_text(encoding="utf-8")))
    assert used
    assert used == defined
