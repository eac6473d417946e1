"""Tests that the pages and settings of the repository agree."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
import zlib

import pytest
import yaml
from packaging.version import Version
from typer.main import get_command

from st_reba_cli import app

from .conftest import ROOT, work_tree

VERSION = runpy.run_path(str(ROOT / "st_reba" / "version.py"))["__version__"]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").glob("*.md")])


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def settings(name: str):
    return yaml.safe_load(text(name))


def named_in_make(page: str) -> list[str]:
    """Return the targets of each ``make`` in a page's code."""
    blocks = "\n".join(re.findall(r"^```bash\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    commands = [*re.findall(r"^make\b([^#\n]*)", blocks, re.MULTILINE), *re.findall(r"`make\b([^`]*)`", page)]
    return [word for command in commands for word in command.split() if "=" not in word]


def found(pattern: str, name: str) -> str:
    """Return the text that the group of a pattern matches in a file."""
    match = re.search(pattern, text(name), re.DOTALL | re.MULTILINE)
    assert match, pattern
    return match[1]


#: What Windows has no file of, also before a suffix; and what none of its names holds, or ends with.
DEVICES = r"(con|prn|aux|nul|com\d|lpt\d)([./]|$)"
FORBIDDEN = re.compile(rf'(?i)[<>:"|?*\\\x00-\x1f]|[. ](/|$)|(^|/){DEVICES}')


def test_windows_allows_every_path():
    paths = list(work_tree())
    assert [path for path in paths if FORBIDDEN.search(path) or len(path) > 150] == []
    assert len({path.lower() for path in paths}) == len(paths)


TARGETS = set(found(r"^\.PHONY:([^\n]*)$", "Makefile").split())


def test_pages_name_targets_that_are_there_and_contributing_all_that_a_contributor_runs():
    named = {page.name: set(named_in_make(page.read_text(encoding="utf-8"))) for page in PAGES}
    assert {name: targets - TARGETS for name, targets in named.items() if targets - TARGETS} == {}
    assert TARGETS - named["CONTRIBUTING.md"] == {"bench", "clean", "real"}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md"])
def test_what_a_page_names_lies_there(name):
    page = text(name)
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page)
    paths = re.findall(r"`((?:st_reba|tests|docs|benchmarks|\.ci)/[\w./-]*\w)/?`", page)
    assert [path for path in [*links, *paths] if not (ROOT / path).exists()] == []


def test_the_readme_is_short_and_has_no_dead_link_on_pypi():
    page = text("README.md")
    assert len(page.splitlines()) < 200
    made = tomllib.loads(text("pyproject.toml"))["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    for each in made["substitutions"]:
        page = re.sub(each["pattern"], each["replacement"], page)
    assert re.findall(r"\]\((?!https?:)", page) == []
    assert "[sentence-transformers](https://www.sbert.net)" in page


def test_the_floors_are_those_that_lint_checks():
    layers = found(r"^layers = \[\n(.*?)^\]", "pyproject.toml")
    table = text("CONTRIBUTING.md").partition("| floor |")[2].partition("\n\n")[0]
    floors = [set(re.findall(r"`(\w+)", row.split("|")[1])) for row in table.splitlines()[2:]]
    assert floors == [set(re.findall(r"(?:st_reba\.)?\b(\w+)[\w.]*", line)) for line in layers.splitlines()]


def test_releases_are_in_order_and_this_version_is_the_last():
    heads = re.findall(r"^## (.+)$", text("CHANGELOG.md"), re.MULTILINE)
    assert heads[0] == "Unreleased"
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", head) for head in heads[1:])
    versions, dates = zip(*(head.split(" - ") for head in heads[1:]), strict=True)
    assert list(versions) == sorted(set(versions), key=Version, reverse=True)
    assert list(dates) == sorted(dates, reverse=True)
    citation = settings("CITATION.cff")
    assert citation["version"] == VERSION
    if Version(VERSION).is_devrelease:  # what is under Unreleased becomes this version
        assert Version(VERSION) > Version(versions[0])
        assert "date-released" not in citation
    else:
        assert (VERSION, str(citation["date-released"])) == (versions[0], dates[0])


def test_the_wheel_is_small():
    files = [path for path in (ROOT / "st_reba").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sum(len(zlib.compress(path.read_bytes())) for path in files) < 1e6


class TestDocker:
    def test_it_starts_what_serves(self):
        program, command = json.loads(found(r"^ENTRYPOINT ([^\n]*)$", "docker/Dockerfile"))
        assert (program, command) == ("st-reba", "serve")
        known = {option for each in get_command(app).commands["serve"].params for option in each.opts}
        given = json.loads(found(r"^CMD ([^\n]*)$", "docker/Dockerfile"))
        assert {word for word in given if word.startswith("--")} <= known

    def test_what_the_wheel_is_made_of_is_sent(self):
        own = tomllib.loads(text("pyproject.toml"))
        built = own["tool"]["hatch"]["build"]["targets"]["wheel"]
        readme = own["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["fragments"][0]["path"]
        needed = ["pyproject.toml", readme, *own["project"]["license-files"], *built["packages"]]
        sent = {line.removeprefix("!") for line in text(".dockerignore").splitlines() if line.startswith("!")}
        assert sent == {*needed}


def test_pre_commit_runs_what_lint_runs():
    recipe = found(r"^lint:[^\n]*\n((?:\t[^\n]*\n)+)", "Makefile")
    lint = [line.strip().replace("$(BIN)", ".venv/bin").replace(" --check", "") for line in recipe.splitlines()]
    (local,) = settings(".pre-commit-config.yaml")["repos"]
    assert [hook["entry"] for hook in local["hooks"]] == lint


class TestWorkflows:
    """Tests of workflows, which a source distribution lacks."""

    pytestmark = pytest.mark.skipif(not (ROOT / ".github").exists(), reason="not a clone of the repository")

    def test_ci_runs_what_is_there_on_every_python_that_is_allowed(self):
        jobs = settings(".github/workflows/ci.yml")["jobs"]
        made = jobs["make"]["strategy"]["matrix"]["include"]
        assert any(step.get("run") == "bash .ci/run" for step in jobs["all"]["steps"])
        assert {row["target"] for row in made} <= TARGETS
        paths = [path for row in jobs["paths"]["strategy"]["matrix"]["include"] for path in row["tests"].split()]
        assert [path for path in paths if not (ROOT / path).exists()] == []
        named = [int(minor) for minor in re.findall(r"Python :: 3\.(\d+)", text("pyproject.toml"))]
        assert named[0] == int(found(r'^requires-python = ">=3\.(\d+)"$', "pyproject.toml"))
        assert named == list(range(named[0], named[-1] + 1))
        assert {f"3.{minor}" for minor in named} == {row["python"] for row in made}

    def test_only_what_publishes_may_ask_for_an_identity(self):
        jobs = settings(".github/workflows/release.yml")["jobs"]
        assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == ["publish"]
        assert jobs["publish"]["needs"] == "build"


ROWS = [line.strip("|").split("|") for line in text("docs/internals.md").splitlines() if line.startswith("| `")]
PACKAGES = ("st_reba", "st_reba_cli")
SOURCES = {path: path.read_text(encoding="utf-8") for package in PACKAGES for path in (ROOT / package).rglob("*.py")}

#: A private name asked of anything but oneself, or written as a string, as for getattr.
FOREIGN = re.compile(r"(?:(?<!self)(?<!cls)(?<!super\(\))\.|(?<=\"))(_[a-z]\w*)\b(?<!_)")
#: Documented, in spite of its underscore: of named tuples, and of os; what documents of a data set are known by; how
#: the names of a configuration's parts end.
PUBLIC = {"_replace", "_exit", "_id", "_config"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_a_private_name_is_there_and_has_its_test(row):
    name, _, where, _, guards = row
    path = where.strip(" `")
    assert re.findall(r"`(?:\w+\.)*(\w+)`", name)[0] in SOURCES[ROOT / path]
    for guard in guards.split(","):
        file, test = guard.strip(" `").split("::")
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8")


def test_no_private_name_is_missing():
    source = "\n".join(SOURCES.values())
    documented = {name for row in ROWS for name in re.findall(r"\b_[a-z]\w*", row[0])}
    used = set(FOREIGN.findall(source)) - set(re.findall(r"(?:self\.|cls\.|def )(_[a-z]\w*)", source)) - PUBLIC
    assert used
    assert used - documented == set()
