"""Hundreds of bad values, one at a time and all together: each is refused by a sentence that names its key."""

import random
from enum import Enum
from typing import get_args

import pytest
from attack.seed import SEED

from sparsellm.config import AnalyzeConfig, Config, EvaluateConfig, composition, evaluate_mistakes, mistakes
from sparsellm.config.checkpoint_rules import analyze_mistakes
from sparsellm.config.values import flat_types

# Invalid values for every key of a type.
BAD = {
    int: ["many", "1.5", "true", "[1]", "", "{a: 1}", f"{10**30}", "-1", "1,2", "???", "${a}", "nan"],
    float: ["many", "true", "[1]", "", "{a: 1}", "nan", "inf", "-1", "1,2", "???", "${a}"],
    bool: ["1", "yes", "[true]", "", "null", "2.0", "true,false", "???"],
    Enum: ["nonsense", "1", "[relu]", "", "null", "???"],
    list: ["null", "{a: 1}", "[[a]]"],
    str: ["[a]", "{a: 1}", "${a}", "???"],
}
COMBINATIONS = 40  # of each schema
RULES = {
    Config: lambda config: mistakes(config, 1),
    EvaluateConfig: evaluate_mistakes,
    AnalyzeConfig: analyze_mistakes,
}


def bad_values(kind) -> list[str]:
    options = (
        get_args(kind)
        if not isinstance(kind, type) and get_args(kind) and kind.__class__.__name__ != ("GenericAlias")
        else (kind,)
    )
    if str in options:
        return BAD[str]  # int | str takes every number
    found = []
    for option in options:
        if getattr(option, "__origin__", None) is list:
            found += BAD[list]
        elif option is not type(None):
            found += BAD[Enum] if issubclass(option, Enum) else BAD[option]
    return [value for value in found if value != "null"] + ([] if type(None) in options else ["null"])


def cases(schema) -> list[str]:
    return [f"{key}={value}" for key, kind in flat_types(schema).items() for value in bad_values(kind)]


def refusals(schema, overrides: list[str]) -> list[str]:
    composed = composition(overrides, schema)
    return composed.mistakes or RULES[schema](composed.config)


def said(kind, schema, tried, failed) -> None:
    print(f"{kind} of {schema.__name__}: tried {len(tried)}, held {len(tried) - len(failed)}, failed {len(failed)}")


@pytest.mark.parametrize("schema", [Config, EvaluateConfig, AnalyzeConfig])
@pytest.mark.slow
def test_every_bad_value_is_refused_by_the_name_of_its_key(schema):
    tried = cases(schema)
    failed = []
    for case in tried:
        name = case.partition("=")[0]
        found = refusals(schema, [case])
        if not any(name in mistake or name.partition(".")[2] in mistake for mistake in found):
            failed.append((case, found))
    said("bad values", schema, tried, failed)
    assert failed == []
    if schema is Config:
        assert len(tried) >= 200


def test_all_bad_values_at_once_are_all_refused():
    typed = [f"{key}={bad_values(kind)[0]}" for key, kind in flat_types(Config).items()]
    found = composition(typed).mistakes
    for override in typed:
        name = override.partition("=")[0]
        assert any(mistake.startswith(f"{name} ") for mistake in found), name


@pytest.mark.parametrize("schema", [Config, EvaluateConfig, AnalyzeConfig])
def test_random_combinations_are_refused_by_the_names_of_keys_that_were_typed(schema):
    draw, failed = random.Random(SEED), []
    tried = [draw.sample(cases(schema), draw.randint(2, 8)) for _ in range(COMBINATIONS)]
    for typed in tried:
        found = refusals(schema, typed)
        names = [override.partition("=")[0] for override in typed]
        names += [] if schema is Config else ["checkpoint has no value"]  # it is missing, and no bad value
        if not found or not all(any(name in mistake for name in names) and "\n" not in mistake for mistake in found):
            failed.append((typed, found))
    said("combined bad values", schema, tried, failed)
    assert failed == []


@pytest.mark.parametrize("schema", [Config, EvaluateConfig, AnalyzeConfig])
def test_every_misspelt_key_is_answered_with_the_one_that_is_meant(schema):
    tried, failed = list(flat_types(schema)), []
    for key in tried:
        misspelt = key[:-2] + key[-1] + key[-2] if key[-1] != key[-2] else key + "x"  # the last two letters exchanged
        (mistake,) = composition([f"{misspelt}=1"], schema).mistakes
        if f"did you mean {key[:-1]}" not in mistake and " or " not in mistake:  # beta1 and beta2 are as close
            failed.append(mistake)
    said("misspelt keys", schema, tried, failed)
    assert failed == []
