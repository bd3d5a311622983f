"""One output's place in its grammar: what may come, what may not, and going back."""

import json
from typing import Any

import numpy as np
import pytest
from support.grammars import byte_tokenizer, letter_tokenizer

from specserve.service.errors import BadRequestError
from specserve.service.grammar import MAX_COMPILED, Grammars, Matcher, Matchers
from specserve.service.json_schema import MAX_NESTING, grammar_text, json_grammar
from specserve.service.messages import Constraint
from specserve.service.models import embedded_dir, load_tokenizer

EOS = (0, 1)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TEXT = '{"name": "Ada", "age": 36}'


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(load_tokenizer(embedded_dir("target")), 4096, EOS)


@pytest.fixture
def tokens(grammars: Grammars) -> tuple[int, ...]:
    return tuple(grammars.tokenizer.encode(TEXT, add_special_tokens=False))


def schema_matcher(grammars: Grammars, schema: Any) -> Matcher:
    return grammars.matcher(json_grammar(schema, "response_format"))


def accepts(grammars: Grammars, schema: Any, text: str) -> bool:
    matcher = schema_matcher(grammars, schema)
    taken = all(matcher.advance(token) for token in grammars.tokenizer.encode(text, add_special_tokens=False))
    return taken and bool(matcher.mask()[EOS[0]])


def test_a_trees_masks_are_those_of_every_nodes_own_way(grammars: Grammars, tokens: tuple[int, ...]) -> None:
    matcher = schema_matcher(grammars, PERSON)
    tree = (tokens[0], tokens[0], tokens[1], 17, tokens[2], tokens[1])
    parents = (0, 0, 2, 1, 3, 1)
    masks = matcher.masks(tree, parents)
    for node, way in enumerate([(), (0,), (1,), (1, 2), (0, 3), (1, 2, 4), (0, 5)]):
        path = [tree[one] for one in way]
        alone = schema_matcher(grammars, PERSON)
        allowed = all(alone.advance(token) for token in path)
        assert (masks[node] == (alone.mask() if allowed else True)).all(), node
    assert (masks[0] == matcher.mask()).all()


def test_a_grammar_is_complete_at_its_last_brace_and_admits_only_eos_then(
    grammars: Grammars, tokens: tuple[int, ...]
) -> None:
    matcher = schema_matcher(grammars, PERSON)
    for token in tokens:
        assert not matcher.complete
        assert not matcher.mask()[list(EOS)].any()
        assert not matcher.advance(EOS[1])
        assert matcher.advance(token)
    assert matcher.complete
    assert np.flatnonzero(matcher.mask()).tolist() == list(EOS)
    assert not matcher.advance(tokens[0])
    assert matcher.advance(EOS[1])
    assert matcher.complete


def test_eos_is_allowed_where_a_number_may_end_and_so_are_more_digits(grammars: Grammars) -> None:
    matcher = schema_matcher(grammars, {"type": "integer"})
    (one,) = grammars.tokenizer.encode("1", add_special_tokens=False)
    assert matcher.advance(one)
    assert not matcher.complete
    assert matcher.mask()[[*EOS, one]].all()


def test_a_mask_is_what_advance_takes(grammars: Grammars, tokens: tuple[int, ...]) -> None:
    matcher = schema_matcher(grammars, PERSON)
    for token in tokens:
        taken = np.zeros(4096, dtype=np.bool_)
        for candidate in range(4096):
            if matcher.advance(candidate):
                taken[candidate] = True
                matcher.rollback(1)
        assert np.array_equal(taken, matcher.mask())
        assert matcher.advance(token)


def test_masks_after_draft_tokens_are_those_of_the_prefixes(grammars: Grammars, tokens: tuple[int, ...]) -> None:
    matcher = schema_matcher(grammars, PERSON)
    masks = matcher.masks(tokens)
    for place, mask in enumerate(masks):
        fresh = schema_matcher(grammars, PERSON)
        fresh.align(tokens[:place])
        assert np.array_equal(mask, fresh.mask())
    assert np.array_equal(matcher.mask(), masks[0])


@pytest.mark.parametrize("place", range(6))
def test_a_draft_counts_up_to_its_first_forbidden_token(
    grammars: Grammars, tokens: tuple[int, ...], place: int
) -> None:
    matcher = schema_matcher(grammars, PERSON)
    broken = (*tokens[:place], EOS[0], *tokens[place:])
    assert matcher.num_allowed(broken) == place
    assert matcher.num_allowed((*tokens, EOS[0])) == len(tokens) + 1
    assert matcher.num_allowed((*tokens, 9)) == len(tokens)


def test_going_back_over_eos_and_the_last_brace_leads_where_one_was(
    grammars: Grammars, tokens: tuple[int, ...]
) -> None:
    matcher = schema_matcher(grammars, PERSON)
    before = []
    for token in (*tokens, EOS[0], EOS[1]):
        before.append(matcher.mask())
        assert matcher.advance(token)
    for mask in reversed(before):
        matcher.rollback(1)
        assert np.array_equal(matcher.mask(), mask)
    for token in tokens:
        assert matcher.advance(token)
    matcher.rollback(len(tokens))
    assert matcher.num_allowed(tokens) == len(tokens)


def test_two_matchers_of_one_grammar_do_not_share_their_place(grammars: Grammars, tokens: tuple[int, ...]) -> None:
    one, other = schema_matcher(grammars, PERSON), schema_matcher(grammars, PERSON)
    one.align(tokens)
    assert other.num_allowed(tokens) == len(tokens)
    assert one.complete
    assert not other.complete


def test_a_matcher_follows_its_request_through_replays_and_restarts(
    grammars: Grammars, tokens: tuple[int, ...]
) -> None:
    grammar = json_grammar(PERSON, "response_format")
    kept = Matchers(grammars)
    for length in (0, 3, 3, 7, 5, len(tokens), 1, 0):
        constraint = Constraint(grammar, tokens[:length])
        rebuilt = Matchers(grammars).at("r", constraint).masks(tokens[length:])
        assert np.array_equal(kept.at("r", constraint).masks(tokens[length:]), rebuilt)


def test_a_model_without_eos_stops_at_the_last_brace_and_never_takes_a_token_for_eos() -> None:
    tokenizer = byte_tokenizer()
    bare = Grammars(tokenizer, 256, ())
    matcher = schema_matcher(bare, {"type": "integer"})
    matcher.advance(tokenizer.encode("1")[0])
    assert tokenizer.decode(np.flatnonzero(matcher.mask())) == "0123456789"
    whole = schema_matcher(bare, PERSON)
    whole.align(tokenizer.encode(TEXT))
    assert whole.complete
    assert whole.mask().all()
    assert not whole.advance(0)


def test_where_no_token_spells_the_next_byte_there_is_no_way_on() -> None:
    tokenizer = byte_tokenizer(without="}")
    matcher = schema_matcher(Grammars(tokenizer, 256, (200,)), {"type": "object", "additionalProperties": False})
    matcher.align(tokenizer.encode("{"))
    matcher.align(tokenizer.encode("{ "))
    assert np.flatnonzero(matcher.mask()).tolist() == [200]
    assert not matcher.advance(200)


def test_compiled_grammars_are_bounded(grammars: Grammars) -> None:
    own = Grammars(grammars.tokenizer, 4096, EOS)
    for number in range(MAX_COMPILED + 9):
        schema_matcher(own, {"const": number})
    assert len(own._compiled) == MAX_COMPILED


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object"}, '{"a": [1, {"b": null}]}', "[]"),
        (PERSON, '{"name":"x","age":-1}', '{"age": 1, "name": "x"}'),
        ({"enum": ["red", 3, None]}, '"red"', '"blue"'),
        ({"type": "integer", "minimum": 3, "maximum": 120}, "99", "121"),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}, "[true, false]", "[]"),
        ({"type": "string", "pattern": "^[a-c]+$"}, '"abc"', '"abd"'),
        ({"type": "string", "format": "date"}, '"2024-02-29"', '"2024"'),
        (
            {"$defs": {"n": {"type": ["null", "integer"]}}, "type": "array", "items": {"$ref": "#/$defs/n"}},
            "[1]",
            '[""]',
        ),
    ],
)
def test_schemas_admit_what_they_say(grammars: Grammars, schema: Any, good: str, bad: str) -> None:
    assert accepts(grammars, schema, good)
    assert not accepts(grammars, schema, bad)


def test_white_space_is_bounded(grammars: Grammars) -> None:
    assert accepts(grammars, PERSON, json.dumps(json.loads(TEXT), indent=2))
    assert not accepts(grammars, PERSON, '{  "name": "x", "age": 1}')
    assert not accepts(grammars, PERSON, '{\n\n"name": "x", "age": 1}')


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    while depth > 1:
        schema, depth = {"items": schema}, depth - 1
    return schema


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ([], "must be an object"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
        ({"properties": {"not": {"not": {}}}}, "'not'"),
        ({"anyOf": [{"items": {"contains": {}}}]}, "'contains'"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "'x-guidance'"),
        ({"$defs": {"a": {"frobnicate": 1}}}, "'frobnicate'"),
        ({"type": "strnig"}, "strnig"),
        ({"type": "string", "format": "frob"}, "frob"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"oneOf": [{"minimum": 0}, {"maximum": 5}]}, "oneOf"),
        ({"type": "string", "pattern": "("}, "regex"),
        (nested(MAX_NESTING + 1), f"{MAX_NESTING} deep"),
        ({"enum": ["x" * 70_000]}, "65536 bytes"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(grammars: Grammars, schema: Any, said: str) -> None:
    with pytest.raises(BadRequestError, match="response_format") as refused:
        schema_matcher(grammars, schema)
    assert refused.value.param == "response_format"
    assert said in refused.value.message


def test_the_deepest_schema_and_names_of_keywords_as_properties_are_fine(grammars: Grammars) -> None:
    schema_matcher(grammars, nested(MAX_NESTING))
    schema_matcher(grammars, {"type": "object", "properties": {"not": {"const": {"if": 1}}, "contains": True}})


def test_no_mask_survives_the_tokens_it_was_made_for() -> None:
    """A library's cache of masks by the output's length in bytes would give `ab` the mask of `ba`."""
    letters = Grammars(letter_tokenizer(("a", "b", "ab")), 4, (3,))
    matcher = letters.matcher(grammar_text('start: ("a" "b"?)? ("b" "a")* "a"'))
    assert matcher.masks((1, 0))[2].tolist() == [True, True, False, False]
    assert matcher.masks((2,))[1].tolist() == [True, True, True, False]
