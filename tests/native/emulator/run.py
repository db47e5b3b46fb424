"""Runs the compiled AVX-512 kernels in Bochs, an emulator of whole PCs, where no processor at hand has AVX-512.

`avx512_emulated.h` shows that the source means the right thing; this shows that the compiler made the right instructions of it. The
program of `tests/native` is built with the flags of the module (read from CMakeLists.txt), put into an initramfs as the only
process, and booted; each set of cases must pass there, with the digest that the AVX2 build has on this machine.

Not a test that CI runs: it needs Bochs with EVEX, a kernel image and a boot loader, and takes minutes. See README.md beside it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
NATIVE = HERE.parent
ROOT = NATIVE.parents[1]
SETS = ("simd", "row", "linear", "attention", "sampling", "pool", "program")
DEFINITION = "definition"
CONSOLE = (5, 1)
MODEL, FEATURES = "corei7_skylake_x", "avx512vnni avx512bf16"
"""Linux 6.1 hangs at its start on the emulator's Sapphire Rapids, so an older model gets what it lacks."""

SPEED = 20_000_000
"""Instructions that make an emulated second. Bochs runs more of them, so that what the kernel waits for costs little."""

KERNEL_OPTIONS = (
    "console=ttyS0,115200 nokaslr mitigations=off nosmp acpi=off noapic nolapic idle=poll tsc=reliable "
    f"tsc_early_khz={SPEED // 1000} random.trust_cpu=on panic=1 lsm="
)
BOOT_OPTIONS = ("-b", "isolinux.bin", "-c", "boot.cat", "-no-emul-boot", "-boot-load-size", "4", "-boot-info-table")


def module_flags(module: str) -> list[str]:
    """How CMakeLists.txt compiles one module, without what belongs to Python; or how the definition of 16-bit dot products is."""
    if module == DEFINITION:
        return [*module_flags("_cpu_avx2"), "-DKVIST_BF16_DOT"]
    text = re.sub(r"#.*", "", (ROOT / "CMakeLists.txt").read_text(encoding="utf-8"))
    named: dict[str, str] = dict(re.findall(r"set\((\w+) ([^)]*)\)", text))
    own = re.search(rf'kvist_module\({module} "?([\w;]+)"? ([^)]*)\)', text)
    common = re.search(r"target_compile_options\(\S+ PRIVATE (.*) \$\{ARGN\}\)", text)
    assert own, module
    assert common
    words = re.sub(r"\$\{(\w+)\}", lambda name: named[name[1]], f"{common[1]} {own[2]}")
    return [f"-std=gnu++{named['CMAKE_CXX_STANDARD']}", *words.split(), *(f"-D{name}" for name in own[1].split(";"))]


def build(module: str, folder: Path) -> Path:
    """The test program, each source compiled by itself as in the module, linked statically."""
    folder.mkdir(parents=True, exist_ok=True)
    flags = [*module_flags(module), "-DNDEBUG", f"-DKVIST_NAMESPACE=kvist{module}", f"-I{ROOT / 'csrc'}", f"-I{NATIVE}", "-pthread"]
    objects = []
    for source in [*sorted((ROOT / "csrc").glob("*.cpp")), *sorted(NATIVE.glob("*.cpp"))]:
        if source.name.startswith("module"):
            continue
        target = folder / f"{source.parent.name}-{source.stem}.o"
        subprocess.run(["g++", *flags, "-c", str(source), "-o", str(target)], check=True)
        objects.append(str(target))
    program = folder / "kernels_test"
    subprocess.run(["g++", "-static", "-pthread", *objects, "-o", str(program)], check=True)
    return program


def cpio(files: Iterable[tuple[str, int, bytes, tuple[int, int]]]) -> bytes:
    """An initramfs in the `newc` format (the kernel's buffer-format.rst): name, mode, content, device."""
    out = bytearray()
    for number, (name, mode, content, device) in enumerate([*files, ("TRAILER!!!", 0, b"", (0, 0))], 1):
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(name) + 1, 0)
        out += b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
        out += b"\0" * (-len(out) % 4) + content
        out += b"\0" * (-len(out) % 4)
    return bytes(out)


def image(folder: Path, kernel: Path, isolinux: Path, modules: Path, program: Path, sets: Iterable[str]) -> Path:
    """A bootable CD whose only process runs the program."""
    disc = folder / "disc"
    disc.mkdir(exist_ok=True)
    init = folder / "init"
    subprocess.run(["gcc", "-O1", "-static", str(HERE / "init.c"), "-o", str(init)], check=True)
    files = [
        ("dev", 0o40755, b"", (0, 0)),
        ("dev/console", 0o20600, b"", CONSOLE),
        ("init", 0o100755, init.read_bytes(), (0, 0)),
        ("kernels_test", 0o100755, program.read_bytes(), (0, 0)),
    ]
    (disc / "initrd").write_bytes(cpio(files))
    (disc / "vmlinuz").write_bytes(kernel.read_bytes())
    (disc / "isolinux.bin").write_bytes(isolinux.read_bytes())
    (disc / "ldlinux.c32").write_bytes((modules / "ldlinux.c32").read_bytes())
    options = f"{KERNEL_OPTIONS} -- {' '.join(f'set:{name}' for name in sets)}"
    (disc / "isolinux.cfg").write_text(
        f"default run\nprompt 0\nlabel run\nkernel /vmlinuz\nappend initrd=/initrd {options}\n", encoding="ascii"
    )
    target = folder / "disc.iso"
    subprocess.run(["genisoimage", "-quiet", "-R", *BOOT_OPTIONS, "-o", str(target), str(disc)], check=True)
    return target


def boot(folder: Path, bochs: Path, bios: Path, vga: Path, disc: Path, seconds: float) -> str:
    """What the machine printed."""
    serial = folder / "serial.txt"
    serial.unlink(missing_ok=True)
    settings = folder / "bochsrc"
    lines = [
        f'cpu: model={MODEL}, add_features="{FEATURES}", count=1, ips={SPEED}, reset_on_triple_fault=0',
        "memory: guest=512, host=512",
        f"romimage: file={bios}",
        f"vgaromimage: file={vga}",
        "ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14",
        f"ata0-master: type=cdrom, path={disc}, status=inserted",
        "boot: cdrom",
        f"com1: enabled=1, mode=file, dev={serial}",
        "display_library: nogui",
        "clock: sync=none",
        f"log: {folder / 'bochs.log'}",
        "panic: action=fatal",
        # Its timer writes to the log too, and hangs where it interrupts another line.
        *(f"{level}: action=ignore" for level in ("error", "info", "debug")),
    ]
    settings.write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = [str(bochs), "-q", "-f", str(settings)]
    try:
        subprocess.run(command, timeout=seconds, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except subprocess.TimeoutExpired:
        print(f"Bochs was ended after {seconds:.0f} s.", file=sys.stderr)
    return serial.read_text(encoding="utf-8", errors="replace") if serial.exists() else ""


def digests(output: str) -> dict[str, str]:
    """Each set that passed, with its digest."""
    return dict(re.findall(r"^passed (\w+)\s+digest ([0-9a-f]{16})\s*$", output, re.MULTILINE))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bochs", type=Path, default=Path("/usr/bin/bochs"), help="3.0 or newer, with EVEX")
    parser.add_argument("--kernel", type=Path, required=True, help="a Linux image (vmlinuz) with its serial console built in")
    parser.add_argument("--bios", type=Path, default=Path("/usr/share/bochs/BIOS-bochs-latest"))
    parser.add_argument("--vga", type=Path, default=Path("/usr/share/vgabios/vgabios.bin"))
    parser.add_argument("--isolinux", type=Path, default=Path("/usr/lib/ISOLINUX/isolinux.bin"))
    parser.add_argument("--modules", type=Path, default=Path("/usr/lib/syslinux/modules/bios"))
    parser.add_argument("--module", default="_cpu_avx512")
    parser.add_argument("--against", default="_cpu_avx2", help=f"whose bits are expected: a module, or {DEFINITION}")
    parser.add_argument("--sets", default=",".join(SETS), help="sets of cases, with commas between them")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "emulator", help="where programs and disc are made")
    parser.add_argument("--seconds", type=float, default=900.0, help="when the emulator is ended")
    given = parser.parse_args()
    names = given.sets.split(",")
    program = build(given.module, given.folder / given.module)
    host = build(given.against, given.folder / given.against)
    disc = image(given.folder, given.kernel, given.isolinux, given.modules, program, names)
    output = boot(given.folder, given.bochs, given.bios, given.vga, disc, given.seconds)
    found = digests(output.replace("\r", ""))
    wrong = 0
    for name in names:
        expected = digests(subprocess.run([str(host), name], capture_output=True, text=True, check=True).stdout)[name]
        wrong += found.get(name) != expected
        print(f"{name:10} {given.module} {found.get(name, 'did not pass'):16}  {given.against} {expected}")
    if wrong:
        print("\n".join(output.splitlines()[-30:]), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
