"""The pages say all there is and nothing that is not: commands, settings, log events, modules."""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer

from cli.main import app
from dev import samples
from shared import config, fields, topics
from shared.parse import parse
from tests.world import envelope

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("terraform/**/*.md")]
)
CODE = ("shared", "functions", "cli", "dev")
LEVELS = ("debug", "info", "warning", "error")
KINDS = {
    "_id": "id, text",
    "_text": "text",
    "_money": "decimal text",
    "_time": "time, UTC",
    "_count": "whole number",
    "_flag": "true or false",
    "_length": "length of the list",
    "_words": "list of text",
}


def page(name: str) -> str:
    return (ROOT / name).read_text()


def rows(text: str) -> dict[str, list[str]]:
    """The rows of all tables, by their first cell without backticks."""
    lines = (line for line in text.splitlines() if line.startswith("| "))
    cells = ([c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines)
    return {row[0].strip("`"): row for row in cells}


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def trees(*folders: str) -> list[ast.Module]:
    """The code of some folders."""
    return [
        ast.parse(path.read_text())
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


def calls(*folders: str) -> Iterator[ast.Call]:
    for tree in trees(*folders):
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def log_events() -> dict[str, str]:
    """The name of every log event in the code, and its level; "" where that varies."""
    found = {}
    for call in calls("shared", "functions", "cli"):
        match call.func:
            case ast.Attribute(value=ast.Name(id="log"), attr=level) if level in LEVELS:
                match call.args[0]:
                    case ast.Constant(value=str(name)):
                        found[name] = level.upper()
                    case other:
                        pytest.fail(f"log.{level}({ast.unparse(other)}): its name is no literal")
            case ast.Name(id="_write") if isinstance(call.args[1], ast.Constant):
                found[str(call.args[1].value)] = ""
    return found


def test_every_command_is_on_the_page_of_operations() -> None:
    described = rows(page("docs/operations.md"))
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert len(commands) >= 7
    assert [name for name in commands if name not in described] == []


def test_every_setting_is_described_with_its_default() -> None:
    described = rows(page("docs/configuration.md"))
    for name, default, _ in config.described():
        assert name in described, f"{name} is not in docs/configuration.md"
        assert described[name][1].strip("`") == default, f"{name} has another default"


def test_no_setting_is_described_that_is_not_there() -> None:
    known = {name for name, _, _ in config.described()} | strings(*CODE, "tests")
    names = {name for name in rows(page("docs/configuration.md")) if re.fullmatch("[A-Z_]+", name)}
    assert names <= known


def test_every_log_event_is_described_with_its_level() -> None:
    described = rows(page("docs/log-events.md"))
    events = log_events()
    assert "event.stored" in events
    for name, level in events.items():
        assert name in described, f"{name} is not in docs/log-events.md"
        assert level in described[name][1], f"{name} is logged as {level}"


def test_no_log_event_is_described_that_nobody_logs() -> None:
    names = {name for name in rows(page("docs/log-events.md")) if re.fullmatch(r"\w+\.\w+", name)}
    assert names == set(log_events())


def test_every_alert_has_its_section_and_there_is_no_other() -> None:
    alerts = re.findall(r"^ +(\w+) = \{\n +title +=", page("terraform/monitoring.tf"), re.MULTILINE)
    titles = re.findall(r"^ +title +=\s+\"(.+)\"$", page("terraform/monitoring.tf"), re.MULTILINE)
    text = page("docs/alerts.md")
    assert len(alerts) == len(titles) >= 10
    assert re.findall(r"^`(\w+)`\. \*\*Means:\*\*", text, re.MULTILINE) == alerts
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == titles


def test_every_make_target_is_described() -> None:
    described = rows(page("CONTRIBUTING.md"))
    targets = re.findall(r"^([a-z-]+):", page("Makefile"), re.MULTILINE)
    assert "test" in targets
    assert [name for name in targets if f"make {name}" not in described] == []


@pytest.mark.parametrize("folder", ["shared", "cli", "dev", "functions"])
def test_every_module_is_on_the_code_map(folder: str) -> None:
    text = page("ARCHITECTURE.md")
    modules = [
        str(path.relative_to(ROOT))
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "__init__.py"
    ]
    assert modules
    assert [path for path in modules if f"`{path}`" not in text] == []


@pytest.mark.parametrize("path", PAGES, ids=ids)
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = path.parent / target if target else path
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("path", PAGES, ids=ids)
def test_every_path_in_backticks_is_there(path: Path) -> None:
    """Paths into this repository, that is: `shared/store.py`, with or without `::a_test`."""
    top = {entry.name for entry in ROOT.iterdir()}
    named = re.findall(r"`([\w./-]+/[\w./-]*)(?:::(\w+))?`", without_code(path.read_text()))
    for name, inner in named:
        if name.split("/")[0] not in top or name.startswith("."):
            continue
        assert (ROOT / name).exists(), f"{name} is not there"
        if inner:
            assert re.search(rf"\b{inner}\b", (ROOT / name).read_text()), f"{name} has no {inner}"


def test_the_map_in_the_readme_names_only_what_is_there() -> None:
    tree = page("README.md").split("## The tree")[1].split("```")[1]
    paths = re.findall(r"^([\w./-]+)  ", tree, re.MULTILINE)
    assert len(paths) >= 10
    assert [name for name in paths if not (ROOT / name).exists()] == []


def test_the_map_in_the_readme_names_every_folder() -> None:
    tree = page("README.md").split("## The tree")[1].split("```")[1]
    folders = [path.name for path in ROOT.iterdir() if path.is_dir() and any(path.rglob("*.*"))]
    ignored = page(".gitignore").split()
    missing = [
        name
        for name in folders
        if not name.startswith(".")
        and not any(Path(name).match(pattern.rstrip("/")) for pattern in ignored)
        and f"{name}/" not in tree
    ]
    assert missing == []


@pytest.mark.parametrize("path", PAGES, ids=ids)
def test_every_environment_variable_on_a_page_is_read_by_some_code(path: Path) -> None:
    """Words in capitals with an underscore, that is, in backticks or before an equals sign."""
    text = path.read_text()
    named = set(re.findall(r"`([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)`", text))
    named |= set(re.findall(r"^(?:export )?([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)=", text, re.MULTILINE))
    known = {name for name, _, _ in config.described()} | strings(*CODE, "tests") | constants(*CODE)
    assert named - known == set()


def test_the_tables_of_parsed_fields_are_those_of_the_code() -> None:
    text = page("docs/schema.md")
    for resource in fields.FIELDS:
        expected = parsed_section(resource)
        assert expected in text, f"docs/schema.md should say:\n\n{expected}"


def parsed_section(resource: str) -> str:
    """What docs/schema.md says of one resource: its topics, its fields by kind, and an example."""
    known = [topic for topic in topics.TOPICS.values() if topic.table == f"shopify_{resource}"]
    kinds = {
        KINDS["_id"]: [_place(name, rules) for name, rules in _ids(known[0])],
        KINDS["_text"]: ["`admin_graphql_api_id`"],
    }
    for field in fields.FIELDS[resource]:
        places = kinds.setdefault(KINDS[field.read.__name__], [])
        places.append(_place(field.name, field.rules))
    topic, example = _fullest_example(resource)
    return "\n".join(
        [
            f"### `shopify_{resource}`",
            "",
            "Topics: " + ", ".join(f"`{topic.name}`" for topic in known) + ".",
            "",
            "| kind | fields |",
            "|---|---|",
            *(f"| {kind} | {', '.join(places)} |" for kind, places in kinds.items()),
            "",
            f"From the sample of `{topic}`:",
            "",
            "```json",
            example,
            "```",
        ]
    )


def _ids(topic: topics.Topic) -> list[tuple[str, fields.Rules]]:
    return [("id", topic.id), *topic.parents.items()]


def _place(name: str, rules: fields.Rules) -> str:
    where = " or ".join(f"`{rule}`" for rule in rules)
    return f"`{name}`" if rules == (name,) else f"`{name}` from {where}"


def _fullest_example(resource: str) -> tuple[str, str]:
    """The sample with the most fields, parsed, as JSON in short lines."""
    found = []
    for topic in samples.topics():
        if topics.lookup(topic).table == f"shopify_{resource}":
            found.append((topic, dict(parse(envelope(samples.load(topic), topic)).parsed)))
    topic, parsed = max(found, key=lambda pair: len(pair[1]))
    lines = ["{"]
    for name, value in parsed.items():
        item = f'"{name}": {json.dumps(value, ensure_ascii=False)}, '
        if lines == ["{"] or len(lines[-1] + item) > 100:
            lines.append("  ")
        lines[-1] += item
    lines[-1] = lines[-1].removesuffix(", ")
    return topic, "\n".join([*(line.rstrip() for line in lines), "}"])


@cache
def strings(*folders: str) -> frozenset[str]:
    """Every text in the code that is an upper-case name."""
    return frozenset(
        node.value
        for tree in trees(*folders)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch("[A-Z][A-Z0-9_]+", node.value)
    )


@cache
def constants(*folders: str) -> frozenset[str]:
    """The names in capitals that modules give to values."""
    return frozenset(
        node.id
        for tree in trees(*folders)
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )


def without_code(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", without_code(text), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading).strip().lower() for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}
