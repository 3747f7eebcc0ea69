"""The project's files agree: versions, the changelog, the workflows and what they call."""

import re
import shlex
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text())
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
}
JOBS = {name: workflow["jobs"] for name, workflow in WORKFLOWS.items()}
PYTHONS = ["3.11", "3.12", "3.13"]
# Distributions that a workflow installs by itself, or that come with Python.
TOOLS = {"pip", "venv", "uv", "twine", "pre-commit"}


def steps(workflow: str) -> list[tuple[str, dict]]:
    jobs = JOBS[workflow].items()
    return [(job, step) for job, content in jobs for step in content.get("steps", [])]


def commands(workflow: str) -> list[tuple[str, list[str]]]:
    """The words of each command, without the Python that runs it."""
    found = []
    for job, step in steps(workflow):
        for line in step.get("run", "").splitlines():
            words = shlex.split(line.split("&&")[-1])
            found.append((job, words))
    return found


def distributions(extra: str) -> set[str]:
    """The names of what an extra installs, with the extras that it names."""
    found: set[str] = set()
    for requirement in EXTRAS[extra]:
        name, extras = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?", requirement).groups()
        found |= {name}
        if name == "zoo":
            found |= set().union(*(distributions(other) for other in extras.split(",")))
    return found


def test_python_versions_agree():
    [lowest] = re.findall(r">=(3\.\d+)", PROJECT["requires-python"])
    classifiers = re.findall(r"Python :: (3\.\d+)\"?", "\n".join(PROJECT["classifiers"]))
    matrix = JOBS["ci"]["tests"]["strategy"]["matrix"]
    assert PYTHONS == classifiers == matrix["python"]
    assert lowest == PYTHONS[0]
    others = {case["versions"]: case["python"] for case in matrix["include"]}
    assert others == {"oldest": PYTHONS[0], "newest": PYTHONS[-1]}
    conditions = {step["if"] for _, step in steps("ci") if "if" in step}
    assert conditions == {f"matrix.versions == '{x}'" for x in (*matrix["versions"], *others)}


def test_workflows_install_what_they_run():
    """Each `python -m` is of an extra that the job installs, and each file and extra is there."""
    modules = set()
    for job, words in commands("ci"):
        text = " ".join(words)
        for extra in re.findall(r"\.\[([\w,-]+)\]", text):
            assert set(extra.split(",")) <= EXTRAS.keys()
        for file in re.findall(r"\b(?:tests/[\w/]+\.py|constraints\.txt)\b", text):
            assert (ROOT / file).is_file()
        if words[1:2] != ["-m"]:
            continue
        name, _, recipe = words[2].partition(".recipes.")
        modules.add(name)
        assert not recipe or (ROOT / "recipes" / f"{recipe}.py").is_file()
        installs = re.findall(
            r"-e \.\[([\w,]+)\]", " ".join(" ".join(w) for j, w in commands("ci") if j == job)
        )
        installed = set().union({"zoo"}, *(distributions(x) for x in installs)) | TOOLS
        assert {name, f"{name}-material"} & installed, f"{job}: {text}"
    assert {"pytest", "build", "mkdocs", "zoo"} <= modules


def test_workflows_test_as_readme_does():
    [command] = re.findall(
        r"^python3 -m venv \.venv && (.* -m pytest)$", (ROOT / "README.md").read_text(), re.M
    )
    readme = {
        tuple(shlex.split(part.replace(".venv/bin/", "").replace("-q ", ""))[-3:])
        for part in command.split("&&")
    }
    called = {tuple(words[-3:]) for job, words in commands("ci") if job == "tests"}
    assert len(readme) == 2
    assert {words[-1] for words in readme} <= {words[-1] for words in called}
    slow = [words[2:] for job, words in commands("ci") if job == "slow"]
    assert ["pytest", "-m", "slow"] in slow


def test_needs_and_reused_workflows_exist():
    for jobs in JOBS.values():
        for job in jobs.values():
            assert {job["needs"]} <= jobs.keys() if "needs" in job else True
            assert (ROOT / job["uses"]).is_file() if "uses" in job else True
    uploaded = [s["with"]["name"] for _, s in steps("ci") if "upload-artifact" in s.get("uses", "")]
    used = [s["with"]["name"] for _, s in steps("release") if "download" in s.get("uses", "")]
    assert uploaded == used == ["dist"]


def test_only_trusted_publishing_may_write():
    assert all(workflow["permissions"] == {"contents": "read"} for workflow in WORKFLOWS.values())
    publish = JOBS["release"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text()


def test_changelog_has_the_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[(.*?)\](?: - (\d{4}-\d\d-\d\d))?$", text, re.M)
    assert headings[0] == ("Unreleased", "")
    assert headings[1][0] == PROJECT["version"]
    assert all(date for _, date in headings[1:])
    kinds = re.findall(r"^### (.*)$", text, re.M)
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_release_compares_tag_version_and_changelog():
    [step] = [s for job, s in steps("release") if job == "version" and "run" in s]
    patterns = re.findall(r'grep -q\w+ "(.*)" (\S+)$', step["run"], re.M)
    assert len(patterns) == 2
    for pattern, file in patterns:
        text = pattern.replace("${GITHUB_REF_NAME#v}", PROJECT["version"]).replace('\\"', '"')
        assert text in (ROOT / file).read_text()


def test_hooks_are_the_documented_checks():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    system = {
        hook["entry"].replace(" --force-exclude", "")
        for hook in hooks
        if hook["language"] == "system"
    }
    documented = re.search(
        r"^\.venv/bin/ruff check.*$", (ROOT / "CONTRIBUTING.md").read_text(), re.M
    )[0]
    assert {
        part.strip().removeprefix(".venv/bin/").removesuffix(" .")
        for part in documented.split("&&")
    } == system
