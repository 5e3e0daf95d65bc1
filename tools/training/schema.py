"""The JSON schema of a configuration: for editors, for the form of a deployment, and for the names of trainer fields.

It lies beside this file as train.schema.json, so that none of them imports torch. `make schema` writes it anew from the
groups and from the config classes of the stages.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("train.schema.json")
Schema = dict[str, Any]


@cache
def written() -> Schema:
    """The schema as it lies on disk."""
    schema: Schema = json.loads(FILE.read_text(encoding="utf-8"))
    return schema


def trainer_fields() -> frozenset[str]:
    """The names that `training` may have in one stage or another."""
    return frozenset(written()["properties"]["training"]["properties"])


def values_schema() -> Schema:
    """The same schema with nothing required: values that go over those of a file."""
    groups = {name: {**group, "required": []} for name, group in written()["properties"].items()}
    return {**written(), "properties": groups, "required": []}


def make() -> str:
    """The text of train.schema.json."""
    from tools.training.config import TrainConfig

    schema = _inlined(TrainConfig.model_json_schema())
    training = schema["properties"]["training"]
    training["properties"] = _training_properties()
    training["additionalProperties"] = False
    training["required"] = ["output_dir"]
    training["description"] = "Fields of the stage's own config class: TRL's or transformers'."
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", **schema, "title": "tools train"}
    # Keys that begin so hold anchors for other groups to merge.
    return json.dumps({**schema, "patternProperties": {"^x-": {}}}, indent=1, ensure_ascii=False) + "\n"


def _training_properties() -> Schema:
    """Each field that a stage's config class has and a configuration may give: its type, and whose field it is."""
    from dataclasses import fields
    from typing import get_type_hints

    from tools.training.stages import STAGES, load_stage
    from tools.training.trainer_arguments import allowed, owner

    found: Schema = {}
    stages_of: dict[str, list[str]] = {}
    for stage in STAGES:
        arguments = load_stage(stage).ARGUMENTS
        types = get_type_hints(arguments)
        for field in fields(arguments):
            if field.name in allowed(arguments):
                whose = owner(field.name, arguments)
                about = {"description": f"a field of {whose.__name__} of {whose.__module__.partition('.')[0]}"}
                found.setdefault(field.name, about | _json_type(types[field.name]))
                stages_of.setdefault(field.name, []).append(stage)
    for name, stages in stages_of.items():
        if len(stages) < len(STAGES):
            found[name]["description"] += f", stage {', '.join(stages)}"
    return dict(sorted(found.items()))


def _json_type(annotation: Any) -> Schema:
    """The schema of one type; a type that no text can give has none."""
    from pydantic import ConfigDict, TypeAdapter
    from pydantic.errors import PydanticInvalidForJsonSchema

    from tools.training.trainer_arguments import choices

    if among := choices(annotation):
        return {"enum": [*among, *([False] if "no" in among else [])]}
    try:
        return _inlined(TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True)).json_schema())
    except PydanticInvalidForJsonSchema:
        return {}


def _inlined(schema: Schema) -> Schema:
    """The schema with every reference replaced by what it refers to, which all readers understand."""
    named = schema.pop("$defs", {})

    def without_references(node: Any) -> Any:
        if isinstance(node, list):
            return [without_references(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            rest = {key: value for key, value in node.items() if key != "$ref"}
            return without_references({**named[node["$ref"].rpartition("/")[2]], **rest})
        return {key: without_references(value) for key, value in node.items() if key != "title" or value is None}

    inlined: Schema = without_references(schema)
    return inlined


if __name__ == "__main__":
    FILE.write_text(make(), encoding="utf-8")
