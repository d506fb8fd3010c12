"""What pydantic found wrong as one sentence, with the nearest known key for an unknown one."""

from difflib import get_close_matches

from pydantic import BaseModel, ValidationError


def sentence(error: ValidationError, top: type[BaseModel]) -> str:
    """The first thing that is wrong with what should have been a ``top``."""
    first = error.errors(include_url=False)[0]
    path, table = _walk([str(part) for part in first["loc"]], top)
    key = ".".join(path)
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])
        known = list(table.model_fields)
        near = get_close_matches(name, known, 1)
        advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        return f"the key {'.'.join([*path, name])} is unknown; {advice}"
    if first["type"] == "missing":
        return f"the key {key} is missing"
    if first["type"] in ("model_type", "model_attributes_type"):
        return f"{key} is {first['input']!r}; give a table with keys of {', '.join(table.model_fields)}"
    return f"{key} {repr(first['input'])[:100]} cannot be: {first['msg'][0].lower()}{first['msg'][1:]}"


def _walk(location: list[str], table: type[BaseModel]) -> tuple[list[str], type[BaseModel]]:
    """The keys of ``location`` that are known, without what pydantic adds for unions, and the table of the last."""
    path: list[str] = []
    for name in location:
        if name not in table.model_fields:
            break
        path.append(name)
        inner = table.model_fields[name].annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            table = inner
    return path, table
