"""`python -m tools.sass install`; then `python -m tools.sass show FILE [NAME ...]` for the list `CONFIGS` in FILE."""

import argparse
import concurrent.futures
import pathlib
import runpy
import sys

from tools.sass.report import WORKERS, Compiled, Config, compile_lowered
from tools.sass.toolchain import SassError, find, install

ROW = "{:40} {:>5} {:>7} {:>13} {:>8} {:>7}  {}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.sass", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("install", help="install the compiler for the present JAX into .sass/")
    show_parser = commands.add_parser("show", help="compile the kernels in the list CONFIGS of a Python file")
    show_parser.add_argument("file", type=pathlib.Path)
    show_parser.add_argument("names", nargs="*", help="only these; by default all")
    show_parser.add_argument("--order", action="store_true", help="also print the order of the instructions")
    show_parser.add_argument("--sass", type=pathlib.Path, metavar="FOLDER", help="write SASS and PTX there")
    arguments = parser.parse_args()
    try:
        if arguments.command == "install":
            install()
            return 0
        configs = runpy.run_path(str(arguments.file))["CONFIGS"]
        return show(configs, arguments.names, order=arguments.order, folder=arguments.sass)
    except SassError as error:
        print(error, file=sys.stderr)
        return 1


def show(configs: list[Config], names: list[str], *, order: bool, folder: pathlib.Path | None) -> int:
    toolchain = find()
    if unknown := set(names) - {config.name for config in configs}:
        raise SassError(f"no config is called {', '.join(sorted(unknown))}")
    chosen = [config for config in configs if not names or config.name in names]
    print(ROW.format("config", "regs", "launch", "spills st/ld", "smem", "instr", ""))
    failures = 0
    # Lowered here, one after the other, while the processes compile.
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        running = [(config, pool.submit(compile_lowered, config.lower(), toolchain=toolchain)) for config in chosen]
        for config, future in running:
            try:
                kernels = future.result()
            except SassError as error:
                failures += 1
                print(f"{config.name}: {error}")
                continue
            for kernel in kernels:
                _print(config, kernel, order=order)
                if folder is not None:
                    folder.mkdir(parents=True, exist_ok=True)
                    (folder / f"{config.name}-{kernel.name}.sass").write_text(kernel.sass)
                    (folder / f"{config.name}-{kernel.name}.ptx").write_text(kernel.ptx)
    return 1 if failures else 0


def _print(config: Config, kernel: Compiled, *, order: bool) -> None:
    spills = f"{kernel.spill_store_bytes}/{kernel.spill_load_bytes}"
    faults = "; ".join(config.faults(kernel)) or "ok"
    numbers = kernel.registers, kernel.launch_registers, spills, kernel.dynamic_smem_bytes, kernel.instructions
    print(ROW.format(f"{config.name} {kernel.name}", *numbers, faults), flush=True)
    if order:
        print(f"    {kernel.order}")


if __name__ == "__main__":
    sys.exit(main())
