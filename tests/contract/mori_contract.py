"""What pg_sdma takes for granted of mori, looked up in mori's source.

Nothing of mori is imported: its Python is parsed, and what is compiled is searched for names. The
names are those in pg_sdma's own source, so that one used anew is looked up too.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from pg_sdma import mori_library, mori_transport

COLLECTIVE = "ccl/collective.py"
SHMEM = "shmem/api.py"
LOADED = "_shmem_module_loaded_gpus"


class Used:
    """What pg_sdma uses: names of mori.shmem, and the keywords of its calls."""

    def __init__(self) -> None:
        source = ast.parse(inspect.getsource(mori_transport))
        [sdma] = [n for n in source.body if isinstance(n, ast.ClassDef) and n.name == "_Sdma"]
        calls = [n for n in ast.walk(sdma) if isinstance(n, ast.Call)]
        self.construct = _keywords(calls, "library.collective")
        self.call = _keywords(calls, "self._gather")
        self.landed = _keywords(calls, "self._gather.get_output_transit_buffer")
        self.shmem = sorted(
            {
                n.attr
                for module in (source, ast.parse(inspect.getsource(mori_library)))
                for n in ast.walk(module)
                if isinstance(n, ast.Attribute)
                and ast.unparse(n.value) in ("shmem", "self._library.shmem")
            }
        )
        self.dtypes = [
            ast.unparse(keyword.value)
            for call in calls
            for keyword in call.keywords
            if keyword.arg == "dtype"
        ]


def _keywords(calls: list[ast.Call], function: str) -> list[str]:
    [found] = [call for call in calls if ast.unparse(call.func) == function]
    assert not found.args, f"{function} is called with arguments that have no names"
    return [str(keyword.arg) for keyword in found.keywords]


USED = Used()


def broken(mori: Path) -> list[str]:
    """What is otherwise in the Python source of the package in folder `mori`; empty: nothing."""
    collective = ast.parse((mori / COLLECTIVE).read_text())
    shmem = ast.parse((mori / SHMEM).read_text())
    exported = ast.parse((mori / "ccl/__init__.py").read_text())
    return [
        *_class_problems(collective),
        *_missing(USED.dtypes, _dictionary_keys(collective), "dtypes of buffers"),
        *_missing(["MORI_ENABLE_SDMA"], _texts(collective), COLLECTIVE),
        *_missing(["AllgatherSdma"], _imported(exported), "names of mori.ccl"),
        *_missing([*USED.shmem, LOADED], _defined(shmem), SHMEM),
        *_parameter_problems(
            _function(shmem.body, "shmem_init_attr"),
            mori_library.INIT_ARGUMENTS,
            exactly=True,
        ),
        *([] if _fills(shmem, LOADED) else [f"nothing fills {LOADED}"]),
    ]


def _class_problems(collective: ast.Module) -> list[str]:
    found = [
        n for n in collective.body if isinstance(n, ast.ClassDef) and n.name == "AllgatherSdma"
    ]
    if not found:
        return ["no class AllgatherSdma"]
    methods = {
        "__init__": USED.construct,
        "__call__": USED.call,
        "get_output_transit_buffer": USED.landed,
    }
    problems = []
    for method, names in methods.items():
        problems += _parameter_problems(_function(found[0].body, method), names, what=method)
    return problems


def _function(body: list[ast.stmt], name: str) -> ast.FunctionDef | None:
    return next((n for n in body if isinstance(n, ast.FunctionDef) and n.name == name), None)


def _parameter_problems(
    function: ast.FunctionDef | None, names: object, what: str = "", exactly: bool = False
) -> list[str]:
    if function is None:
        return [f"no function {what}"]
    taken = [a.arg for a in (*function.args.args, *function.args.kwonlyargs)]
    if exactly:  # it is called by position
        wanted = list(names)  # type: ignore[call-overload]
        return [] if taken == wanted else [f"{function.name} takes {taken}, not {wanted}"]
    return _missing(names, taken, f"parameters of {function.name}")


def _missing(names: object, there: object, where: str) -> list[str]:
    return [f"no {name} among the {where}" for name in names if name not in there]  # type: ignore


def _dictionary_keys(module: ast.Module) -> set[str]:
    """Of mori's table of the dtypes that its buffers can be viewed as."""
    names = ("_TORCH_DTYPE_TO_NUMPY",)
    return {
        ast.unparse(key)
        for n in module.body
        if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) in names
        for key in getattr(n.value, "keys", [])
        if key is not None
    }


def _texts(module: ast.Module) -> set[str]:
    return {
        n.value for n in ast.walk(module) if isinstance(n, ast.Constant) and type(n.value) is str
    }


def _imported(module: ast.Module) -> set[str]:
    imports = [n for n in ast.walk(module) if isinstance(n, ast.ImportFrom)]
    return {alias.name for n in imports if n.module == "collective" for alias in n.names}


def _defined(module: ast.Module) -> set[str]:
    names = {n.name for n in module.body if isinstance(n, ast.FunctionDef)}
    for n in module.body:
        targets = n.targets if isinstance(n, ast.Assign) else [getattr(n, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def _fills(module: ast.Module, name: str) -> bool:
    return any(
        ast.unparse(n.func) == f"{name}.add" for n in ast.walk(module) if isinstance(n, ast.Call)
    )
