# SPDX-License-Identifier: Apache-2.0
"""`scripts/lab`: boots hosts on one memory and keeps them up; runs commands of this checkout in them; does to them what a bad day does."""

import argparse
import os
import signal
import sys

from . import LabError, progress
from .control import ACTIONS, Control, ask
from .lab import ALL_MODES, NAMES, UNIT_MB, Lab


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="scripts/lab", description=__doc__)
    commands = top.add_subparsers(dest="what", required=True)
    up = commands.add_parser("up", help="boot hosts A, B, ... and keep them up until `down` or Ctrl-C")
    up.add_argument("--hosts", type=int, default=2, help="2 without; 4 at most")
    up.add_argument("--mode", choices=ALL_MODES, default="cxl", help="what the shared memory is")
    up.add_argument("--size-mb", type=int, default=UNIT_MB, help="of each memory device, in units of 256")
    up.add_argument("--memory-mb", type=int, default=512, help="of each virtual host")
    up.add_argument("--ethernet", action="store_true", help="with a network between the hosts, 10.77.0.1 to .4")
    run = commands.add_parser("run", help="run a command in a host; its exit status is this one's")
    run.add_argument("--env", metavar="NAME=VALUE", action="append", default=[], help="for the command")
    run.add_argument("host", choices=NAMES)
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND")
    for name, text in {"boot": "boot it anew", "log": "show its console"}.items():
        commands.add_parser(name, help=text).add_argument("host", choices=NAMES)
    texts = ("stop its processors", "let them go on", "cut its power", "pull its memory device out", "break its CXL link")
    for name, text in zip(ACTIONS, texts, strict=True):
        commands.add_parser(name.replace("_", "-"), help=text).add_argument("host", choices=NAMES)
    commands.add_parser("status", help="which hosts are up, and where their memory is")
    commands.add_parser("down", help="end the lab")
    return top


def up(arguments: argparse.Namespace) -> None:
    """Boots, serves, ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    control = Control()
    try:
        progress(f"booting {arguments.hosts} hosts, mode {arguments.mode}")
        lab = Lab(arguments.hosts, arguments.mode, arguments.size_mb, arguments.memory_mb, arguments.ethernet)
        with lab:
            for host in lab.hosts:
                progress(f"{host.name}: {' '.join(host.devices)}")
            progress("up; `scripts/lab run A COMMAND...` in another shell, `scripts/lab down` or Ctrl-C ends it")
            try:
                control.serve(lab)
            except KeyboardInterrupt:
                progress("ending")
    finally:
        control.close()


def run(arguments: argparse.Namespace) -> int:
    """Prints what the command prints; its exit status, as a shell has it."""
    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    if not words:
        raise LabError("no command")
    environment = dict(pair.split("=", 1) for pair in arguments.env if "=" in pair)
    status = 1
    for answer in ask("run", host=arguments.host, words=words, environment=environment):
        if "status" in answer:
            status = answer["status"]
        else:
            stream = sys.stderr if answer["error"] else sys.stdout
            stream.write(answer["text"])
            stream.flush()
    return status if status >= 0 else 128 - status


def main() -> int:
    """Exit status 2 where the lab itself fails."""
    arguments = parser().parse_args()
    try:
        if arguments.what == "up":
            up(arguments)
        elif arguments.what == "run":
            return run(arguments)
        else:
            for answer in ask(arguments.what.replace("-", "_"), host=getattr(arguments, "host", None)):
                print(answer["done"])
        return 0
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
