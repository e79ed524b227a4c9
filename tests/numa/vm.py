"""A throw-away virtual machine with several NUMA nodes that runs one command.

The guest is emulated (QEMU without hardware help), so it runs wherever QEMU does. It sees the
host's files, read-only, under a layer that vanishes with it, and has the caller's working directory
and environment. The command's output and exit status are those of this script.

Everything is kept in build/numa: a Debian kernel, unpacked there and never installed, and busybox.
apt fetches both; a missing QEMU is installed if this is root.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import lzma
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # where this is run as a program
from support.project.apt_packages import UnavailableError, apt, install, update_lists

CACHE = Path(__file__).parent.parent.parent / "build/numa"
# The first package that apt knows; linux-image-amd64 is 6.12 in Debian 13. The -cloud kernels lack
# 9p. Weighted interleave needs 6.9.
KERNELS = ("linux-image-6.12-amd64", "linux-image-amd64")
OLDEST_KERNEL = (6, 9)
# Modules that may not be built into the guest's kernel; their dependencies are found.
MODULES = ("virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay")
QEMU = "qemu-system-x86_64"
TOOLS = {QEMU: "qemu-system-x86", "xz": "xz-utils", "zstd": "zstd"}

# The nodes of the machine; the last one has memory but no CPUs.
NODE_MB = (1024, 1024, 512)
NODE_CPUS = (2, 2, 0)
DISTANCES = {(0, 1): 20, (0, 2): 30, (1, 2): 25}
# The firmware's figures (HMAT) from the nearest node with CPUs: its number, MB/s, ns.
NEAREST = ((0, 12_800, 90), (1, 25_600, 90), (1, 6_400, 150))
HUGE_PAGES = "hugepages=0:32,1:32,2:32"

# Exit statuses of this script: EX_UNAVAILABLE, and that of timeout(1).
UNAVAILABLE = 69
NO_ANSWER = 70
TIMED_OUT = 124


# ---- set-up ----


def check_host() -> None:
    """Raise an error if no package could make this host work."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        raise UnavailableError(
            f"it is an x86-64 machine for now and runs this Python, which is for"
            f" {platform.machine()}: use an x86-64 host"
        )
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise UnavailableError("it takes its kernel from Debian's packages, and here is no apt-get")


def unpack(package: str, folder: Path) -> Path:
    """Fetch a package and unpack it below the folder, without installing it."""
    fetched = folder / package
    fetched.mkdir()
    with contextlib.chdir(fetched):  # apt-get downloads to the working directory
        apt("download", package)
    root = fetched / "root"
    archive = next(fetched.glob("*.deb"))
    subprocess.run(["dpkg-deb", "-x", archive, root], check=True)
    return root


def kernel_package() -> str:
    """Return the kernel of a meta package, such as linux-image-6.12.9-amd64."""
    for meta in KERNELS:
        answer = subprocess.run(
            ["apt-cache", "depends", meta], capture_output=True, text=True, check=False
        )
        found = re.search(r"Depends: (linux-image-(\d+)\.(\d+)\S*)", answer.stdout)
        if found and (int(found[2]), int(found[3])) >= OLDEST_KERNEL:
            return found[1]
    raise UnavailableError(
        f"apt knows no kernel from {'.'.join(map(str, OLDEST_KERNEL))} on under the names"
        f" {' and '.join(KERNELS)}: is this Debian 12 or newer, and has apt-get update run?"
    )


def uncompressed(image: bytes) -> bytes:
    """Return the kernel inside a boot image, which starts 3 s sooner, or else the image."""
    for magic, tool in ((b"\xfd7zXZ\0", "xz"), (b"\x28\xb5\x2f\xfd", "zstd")):
        # Other data may contain the magic bytes.
        for match in re.finditer(re.escape(magic), image) if shutil.which(tool) else ():
            # The tools report the bytes after the compressed part as an error, after their output.
            answer = subprocess.run(
                [tool, "-dcq"], input=image[match.start() :], capture_output=True, check=False
            )
            if answer.stdout.startswith(b"\x7fELF"):
                return answer.stdout
    return image


def read_module(path: Path) -> bytes:
    content = path.read_bytes()
    return lzma.decompress(content) if path.suffix == ".xz" else content


def collect_modules(root: Path) -> dict[str, bytes]:
    """Return the files of the modules that the guest needs, in the order of loading."""
    paths = {path.name.split(".")[0].replace("-", "_"): path for path in root.rglob("*.ko*")}
    found: dict[str, bytes] = {}

    def collect(name: str) -> None:
        if name in found or name not in paths:
            return
        content = read_module(paths[name])
        needs = re.search(rb"\0depends=([^\0]*)\0", content)
        for need in (needs[1].decode() if needs else "").split(","):
            collect(need.replace("-", "_"))
        found[name] = content

    for name in MODULES:
        collect(name)
    return found


def set_up() -> None:
    """Fill the cache, once."""
    check_host()
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        if (CACHE / "ready").exists() and shutil.which(QEMU) is not None:
            return
        update_lists()
        install(TOOLS)
        package = kernel_package()
        print(f"unpacking {package} and busybox-static to {CACHE}", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            kernel = unpack(package, Path(folder))
            image = next((kernel / "boot").glob("vmlinuz-*")).read_bytes()
            (CACHE / "vmlinux").write_bytes(uncompressed(image))
            shutil.rmtree(CACHE / "modules", ignore_errors=True)
            (CACHE / "modules").mkdir()
            modules = collect_modules(kernel)
            for name, content in modules.items():
                (CACHE / f"modules/{name}").write_bytes(content)
            (CACHE / "modules/order").write_text("".join(f"{name}\n" for name in modules))
            busybox = unpack("busybox-static", Path(folder))
            shutil.copy(next(busybox.rglob("bin/busybox")), CACHE / "busybox")
        (CACHE / "ready").write_text(f"{package}\n")


# ---- starting ----


def cpio(entries: dict[str, tuple[int, bytes]]) -> bytes:
    """Return an archive in the format of initial RAM disks ("newc") of named modes and contents."""
    parts = []
    trailer = ("TRAILER!!!", (0, b""))
    for number, (name, (mode, content)) in enumerate([*entries.items(), trailer], 1):
        encoded = name.encode() + b"\0"
        sizes = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(encoded), 0)
        head = b"070701" + b"".join(b"%08X" % size for size in sizes) + encoded
        for part in (head, content):
            parts += [part, bytes(-len(part) % 4)]
    return b"".join(parts)


def job(command: list[str]) -> str:
    """Return the script that runs the command with this working directory and environment."""
    lines = [
        f"export {name}={shlex.quote(value)}"
        for name, value in (os.environ | {"UNIMEM_NUMA_VM": "1"}).items()
        if name.isidentifier()
    ]
    return "\n".join([*lines, f"cd {shlex.quote(os.getcwd())}", f"exec {shlex.join(command)}", ""])


def ram_disk(command: list[str]) -> bytes:
    """Return the guest's first files: busybox, the modules, the first process, the job."""
    script = stat.S_IFREG | 0o755
    folder = (stat.S_IFDIR | 0o755, b"")
    entries = dict.fromkeys(("bin", "dev", "modules", "proc", "sys"), folder)
    entries["init"] = (script, (Path(__file__).parent / "init.sh").read_bytes())
    entries["job"] = (script, job(command).encode())
    entries["bin/busybox"] = (script, (CACHE / "busybox").read_bytes())
    entries["bin/sh"] = (stat.S_IFLNK | 0o777, b"busybox")
    for path in (CACHE / "modules").iterdir():
        entries[f"modules/{path.name}"] = (stat.S_IFREG | 0o644, path.read_bytes())
    return cpio(entries)


def nodes() -> list[str]:
    """Return QEMU's options for the nodes, their CPUs, distances and speeds."""
    options = []
    ends = list(itertools.accumulate(NODE_CPUS))
    for node, (mb, n_cpus, end) in enumerate(zip(NODE_MB, NODE_CPUS, ends, strict=True)):
        cpus = f",cpus={end - n_cpus}-{end - 1}" if n_cpus else ""
        options += ["-object", f"memory-backend-ram,id=memory{node},size={mb}M"]
        nearest = f",initiator={NEAREST[node][0]}"
        options += ["-numa", f"node,nodeid={node},memdev=memory{node}{cpus}{nearest}"]
    for (source, target), distance in DISTANCES.items():
        options += ["-numa", f"dist,src={source},dst={target},val={distance}"]
    for node, (near, mb_per_second, ns) in enumerate(NEAREST):
        speed = f"hmat-lb,initiator={near},target={node},hierarchy=memory,data-type=access-"
        options += ["-numa", f"{speed}latency,latency={ns}"]
        options += ["-numa", f"{speed}bandwidth,bandwidth={mb_per_second}M"]
    return options


def qemu_command(folder: Path, output: int) -> list[str]:
    """Return QEMU's command line; `output` is the descriptor for the guest's output."""
    # On a busy host the first ticks may be late, for which the kernel would end.
    boot = f"console=ttyS0 quiet panic=-1 no_timer_check mitigations=off {HUGE_PAGES}"
    boot += " numa_balancing=disable"
    shared = "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"
    options = [
        ("-display", "none"),
        ("-machine", "pc,hmat=on"),
        # One thread: with one per CPU, one kernel in 30 died while it patched itself.
        ("-accel", "tcg,thread=single,tb-size=512"),
        ("-cpu", "max,la57=off"),
        ("-smp", str(sum(NODE_CPUS))),
        ("-m", f"{sum(NODE_MB)}M"),
        ("-kernel", str(CACHE / "vmlinux")),
        ("-initrd", str(folder / "ram_disk")),
        ("-append", boot),
        ("-virtfs", shared),
        ("-chardev", f"file,id=log,path={folder / 'log'}"),
        ("-serial", "chardev:log"),
        ("-device", "virtio-serial-pci"),
        ("-chardev", f"file,id=output,path=/dev/fd/{output}"),
        ("-device", "virtserialport,chardev=output,name=output"),
        ("-chardev", f"file,id=status,path={folder / 'status'}"),
        ("-device", "virtserialport,chardev=status,name=status"),
    ]
    flags = ["-nodefaults", "-no-user-config", "-no-reboot"]
    return [QEMU, *flags, *itertools.chain.from_iterable(options), *nodes()]


def copy_output(source: int) -> None:
    """Copy the guest's output as it arrives."""
    while chunk := os.read(source, 65536):
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()


def run(command: list[str], time_limit: float) -> int:
    """Run the command in a new machine."""
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        folder = Path(name)
        (folder / "ram_disk").write_bytes(ram_disk(command))
        reader, writer = os.pipe()
        machine = subprocess.Popen(
            qemu_command(folder, writer), stdin=subprocess.DEVNULL, pass_fds=(writer,)
        )
        os.close(writer)
        copier = threading.Thread(target=copy_output, args=(reader,))
        copier.start()
        try:
            machine.wait(time_limit)
        except subprocess.TimeoutExpired:
            print(f"vm.py: not finished after {time_limit:.0f} s", file=sys.stderr)
            return TIMED_OUT
        finally:
            machine.kill()
            machine.wait()
            copier.join()
            os.close(reader)
        status = folder / "status"
        if machine.returncode == 0 and status.exists() and (answer := status.read_text().strip()):
            return int(answer)
        log = folder / "log"
        tail = log.read_text(errors="replace").splitlines()[-40:] if log.exists() else []
        lines = ["vm.py: the machine ended without an answer; its log ends:", *tail]
        print("\n".join(lines), file=sys.stderr)
        return NO_ANSWER


def main() -> int:
    """Run the command line's command."""
    parser = argparse.ArgumentParser(
        description="Run a command in a virtual machine with several NUMA nodes.",
        epilog=f"Exit status: the command's; {UNAVAILABLE} when the machine cannot be set up,"
        f" {NO_ANSWER} when it broke, {TIMED_OUT} when the time was over.",
    )
    parser.add_argument("--time-limit", type=float, default=900, metavar="SECONDS")
    parser.add_argument("command", nargs="+", help="behind --")
    arguments = parser.parse_args()
    try:
        set_up()
    except UnavailableError as error:
        print(f"vm.py: no machine with several NUMA nodes: {error}", file=sys.stderr)
        return UNAVAILABLE
    return run(arguments.command, arguments.time_limit)


if __name__ == "__main__":
    sys.exit(main())
