"""The `data` command: which data files are there, what is in them, and what is missing."""

import argparse
from typing import Any

from fasterqk.cli.common import Parser, add_action, add_data_dir, add_json, examples
from fasterqk.console import print_result
from fasterqk.errors import InputError

# Where a data folder may be named; the others need not exist.
NAMED = ("--data-dir", "$FASTERQK_DATA")


def configure(parser: Parser) -> None:
    lines = ("fasterqk-lab data check", "fasterqk-lab data check --data-dir ./data --json")
    parser.epilog = examples(*lines)
    chosen = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    summary = "list the data of every task: what is found, its counts, what is missing"
    check = add_action(chosen, "check", summary, *lines)
    add_data_dir(check)
    add_json(check)


def run(arguments: argparse.Namespace) -> int:
    from fasterqk_lab.tasks import data_source, wrong_checksums

    folder, source = data_source(arguments.data_dir)
    if arguments.data_dir == "":
        raise InputError("--data-dir '' is no folder")
    if source in NAMED and not folder.is_dir():
        raise InputError(f"{source} {str(folder)!r} is no folder")
    tasks = _check(folder)
    wrong = wrong_checksums(folder)
    result = {"data_dir": str(folder), "source": source, "wrong_checksums": wrong, "tasks": tasks}
    print_result(arguments.json, result, _show)
    return 1 if wrong or any(report["status"] == "damaged" for report in tasks.values()) else 0


def _check(folder: Any) -> dict[str, dict[str, Any]]:
    from fasterqk_lab.tasks import TASKS, task_module

    tasks = {}
    for name in TASKS:
        try:
            report = task_module(name).check(folder)
            status = "missing" if report["missing"] else "ready"
        except InputError as error:
            report, status = {"files": [], "missing": [], "error": str(error)}, "damaged"
        tasks[name] = {"status": status, **report}
    return tasks


def _show(found: dict[str, Any]) -> None:
    print(f"data folder {found['data_dir']} (from {found['source']})")
    for name in found["wrong_checksums"]:
        print(f"  {name} is not the file that SHA256SUMS names; get it again")
    for name, report in found["tasks"].items():
        _show_task(name, report)


def _show_task(name: str, report: dict[str, Any]) -> None:
    print(f"\n{name}: {report['status']}")
    for path in report["files"]:
        print(f"  found {path}")
    if report.get("counts"):
        counts, rated = report["counts"], report.get("with_rationale")
        parts = [
            f"{split} {count} questions"
            if rated is None
            else f"{split} {count} ({rated[split]} with rationale)"
            for split, count in counts.items()
        ]
        print(f"  {', '.join(parts)}{'' if report['files'] else '; generated, no file'}")
        if not report["expected"]:
            print("  these are not the counts or the checksum of the published data")
    for line in (*report["missing"], report.get("error"), report.get("note")):
        if line:
            print(f"  {line}")
