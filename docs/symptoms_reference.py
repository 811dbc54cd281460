"""Reference of symptoms that users of other servers reported, from the tests that show Baton's
behaviour."""

import ast
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from docs.tables import code, page, prose, table

_ROOT = Path(__file__).resolve().parents[1]

Symptom = tuple[str, str, str, str, str]
"""Reports, the symptom there, what Baton does, the file of the test, its name."""

_INTRODUCTION = """Users of other servers reported these symptoms, most of them in 2025 and 2026.
Each row says what Baton does, and names the test that shows it. A test that does not exist fails
`make check`."""

_CHAT = "tests/router/text/test_chat_parts.py"
_CONVERSATIONS = "tests/router/apis/test_conversations.py"
_MESSAGES = "tests/router/apis/test_messages.py"
_REFUSALS = "tests/router/apis/test_openai_refusals.py"
_RESPONSES = "tests/router/apis/test_responses.py"
_STREAMS = "tests/router/apis/test_streams.py"
_TEMPLATES = "tests/router/text/test_conversation.py"
_TOOLS = "tests/router/text/test_tool_formats.py"
_GRAMMARS = "tests/router/text/test_output_grammars.py"
_SCHEMAS = "tests/engine/executor/test_grammar.py"
_BYTES = "tests/router/apis/test_http_shapes.py"
_IMAGES = "tests/router/text/images/test_prompt_images.py"

SYMPTOMS: Sequence[Symptom] = (
    (
        "sglang#38319, sglang#38355, Megatron-LM#6993",
        "NaN in one request stays in the prefix cache: later prompts are garbage until a flush",
        "Fails that request with `NonFiniteError`, and keeps nothing that it computed.",
        "tests/engine/test_non_finite.py",
        "test_broken_request_leaves_shared_prefix_right",
    ),
    (
        "vllm#44000",
        "a message of the role `system` within `messages` of `/v1/messages` is refused",
        "Takes it anywhere, as text or as blocks, and counts its tokens.",
        _MESSAGES,
        "test_messages_take_system_turns_anywhere",
    ),
    (
        "ollama#17774, wally#77",
        "a template that takes one leading system message fails at a later one",
        "Marks the later one in the text of a user's turn.",
        _CONVERSATIONS,
        "test_one_conversation_makes_one_prompt_by_every_api",
    ),
    (
        "opencode#17762, opencode#17748",
        "clients do not know the code of a prompt that is too long",
        "Answers 400 with `context_length_exceeded` and the true number of tokens.",
        _REFUSALS,
        "test_front_blames_prompt_that_is_too_long_alone",
    ),
    (
        "pi#5930",
        "the text of that error matches no pattern of a client",
        "Says it in OpenAI's words, and in Anthropic's on `/v1/messages`.",
        _REFUSALS,
        "test_front_blames_long_prompt_of_messages_as_anthropic",
    ),
    (
        "vllm#42474, hive#1629",
        "`max_tokens` above what the prompt leaves is refused",
        "Lowers it to what is left, and names that in `x-baton-clamped`.",
        "tests/router/apis/test_clamped_lengths.py",
        "test_front_clamps_bound_and_names_it",
    ),
    (
        "vllm#50604, vllm#30439",
        "the arguments of a call stream in one burst at its end",
        "Streams them as the model writes them, in every format.",
        _TOOLS,
        "test_parser_streams_arguments_as_they_are_written",
    ),
    (
        "copilot-cli#4286",
        "a client gives up on a stream that is silent for long",
        "Sends a comment, or a ping on `/v1/messages`, while nothing else is sent.",
        _STREAMS,
        "test_stream_is_kept_alive_while_it_is_silent",
    ),
    (
        "vllm#47903",
        "a call that is cut by `max_tokens` shows its marks as text",
        "Returns the call in part, or not at all; marks are never text.",
        _CHAT,
        "test_marks_of_a_call_are_never_content",
    ),
    (
        "vllm#53269",
        "an answer that is cut ends with `tool_calls`",
        "Ends it with `length`.",
        _CHAT,
        "test_cut_off_answer_ends_by_length_with_its_rest",
    ),
    (
        "ogx#6069",
        "a template refuses the role `developer`",
        "Gives it to the template as `system`, unless the template names it.",
        _TEMPLATES,
        "test_normalised_turns_are_those_that_template_takes",
    ),
    (
        "vllm#47761, vllm#43995",
        "malformed arguments of an earlier call fail every later turn",
        "Gives templates an object always, with the text as it is under `arguments`.",
        _TEMPLATES,
        "test_template_gets_arguments_as_an_object",
    ),
    (
        "llama.cpp#25510",
        "cut arguments in the history are an error of the server",
        "Answers; the model reads the arguments as they were cut.",
        _CONVERSATIONS,
        "test_cut_arguments_of_an_earlier_call_reach_the_model",
    ),
    (
        "codex#12669",
        "a message of the assistant without `id` and `status` is refused",
        "Takes it.",
        _CONVERSATIONS,
        "test_response_takes_answer_without_id_and_status",
    ),
    (
        "vllm#35508",
        "an assistant's `content: []` fails",
        "Takes it as an empty text.",
        _CONVERSATIONS,
        "test_history_may_have_empty_lists",
    ),
    (
        "llama.cpp#20156, command-code#885",
        "tools that are no functions fail the request",
        "Leaves them out, and names them in `x-baton-ignored`.",
        "tests/router/apis/test_tools.py",
        "test_tools_that_are_no_functions_are_left_out_and_named",
    ),
    (
        "llama.cpp#23465",
        "the output of a call as a list of parts is refused",
        "Takes it.",
        _RESPONSES,
        "test_conversation_of_items_becomes_messages_of_the_template",
    ),
    (
        "vllm#20663, sglang#15169",
        "reasoning is lost where a call is forced",
        "Returns it before the call.",
        _CHAT,
        "test_forced_call_keeps_the_reasoning_before_it",
    ),
    (
        "opencode#15540",
        "`required: null` in a tool's schema is refused",
        "Takes it as absent, also where calls are forced.",
        _GRAMMARS,
        "test_unfollowed_schema_leaves_the_others_their_grammar",
    ),
    (
        "oh-my-pi#2652",
        "one schema that no grammar can follow fails a turn with many tools",
        "Leaves out that part of the schema; refuses a strict tool, and names the tool.",
        "tests/e2e/test_tool_calls.py",
        "test_unfollowed_schema_is_named_if_strict_and_else_left_out",
    ),
    (
        "club-3090#45",
        "`propertyNames` in the schemas of Claude Code is refused",
        "Leaves it out of the grammar of a tool that is not strict.",
        _GRAMMARS,
        "test_grammar_takes_schemas_with_keywords_it_cannot_follow",
    ),
    (
        "llm-scaler#341",
        "`thinking` blocks in the history are refused",
        "Gives them to the template as reasoning.",
        _MESSAGES,
        "test_conversation_of_blocks_becomes_messages_of_the_template",
    ),
    (
        "vllm#47746",
        "blocks lack required fields",
        "Answers 400 with the path of the field.",
        _MESSAGES,
        "test_front_refuses_bad_message_by_name_of_field",
    ),
    (
        "vllm#55324",
        "`message_delta` lacks `stop_sequence`",
        "Sends it, as null where none ended the answer.",
        _MESSAGES,
        "test_streamed_message_has_a_stop_sequence_or_null",
    ),
    (
        "mlx-knife#68, SwiftLM#126, SwiftLM#133",
        "a stop string that spans several tokens reaches the client in a stream",
        "Holds back what may begin it, and sends nothing of it.",
        "tests/router/text/test_parts.py",
        "test_stop_string_ends_parts_before_it",
    ),
    (
        "ollama#13497, vllm#28874",
        "`bytes` of log-probabilities are wrong for parts of a character",
        "Sends the bytes of each token; together they are the text.",
        _BYTES,
        "test_token_bytes_join_to_text",
    ),
    (
        "vllm#16838",
        "tokens of log-probabilities have the tokenizer's signs, such as `Ġ`",
        "Sends their text.",
        _BYTES,
        "test_token_bytes_cover_every_token",
    ),
    (
        "gbrain#220, openclaw#59048, tabbyAPI#268",
        "embeddings in base64, which OpenAI's client asks for by default, are wrong",
        "Answers in the encoding that was asked for, in the order of the inputs.",
        "tests/e2e/test_embeddings.py",
        "test_embeddings_equal_those_of_transformers",
    ),
    (
        "hermes-agent#64548, vllm#44974",
        "transparent pixels are shown to the model",
        "Lays the image on white.",
        "tests/router/text/images/test_image_process.py",
        "test_pool_puts_transparent_image_on_white",
    ),
    (
        "llama.cpp#20870, ollama#18432",
        "the orientation of EXIF is ignored",
        "Turns the image as it says.",
        _IMAGES,
        "test_image_is_turned_as_its_exif_says",
    ),
    (
        "OmniBot#360, ds4#950",
        "base64 of an image with line breaks is refused",
        "Takes it, also without padding.",
        _IMAGES,
        "test_data_url_equals_the_file",
    ),
    (
        "vllm#36032, sglang#30832",
        "an object of an `anyOf` parameter becomes a string",
        "Gives each parameter a type that its schema admits: an object here.",
        _TOOLS,
        "test_qwen3_coder_types_values_by_all_that_schema_admits",
    ),
    (
        "mlx-lm#1910",
        "a string of digits becomes a number",
        "Keeps the text where the schema admits a string and no number.",
        _TOOLS,
        "test_qwen3_coder_types_values_by_all_that_schema_admits",
    ),
    (
        "llama.cpp#20607, lemonade#3607",
        "events of a response have wrong indices and ids of items",
        "Names in each delta the item that was opened last.",
        _RESPONSES,
        "test_response_stream_adds_up_to_the_whole",
    ),
    (
        "hermes-agent#119758",
        "a stream of a response lacks the events of content parts",
        "Sends `response.content_part.added` and `.done`.",
        "tests/e2e/test_responses.py",
        "test_response_streams_typed_events_in_order",
    ),
    (
        "bifrost#2441",
        "an unknown `previous_response_id` has a code that clients do not know",
        "Answers 400 with `previous_response_not_found`.",
        _RESPONSES,
        "test_unknown_previous_response_has_its_own_code",
    ),
    (
        "mlx-vlm#1046",
        "`previous_response_id` is ignored",
        "Continues the stored conversation.",
        "tests/e2e/test_responses.py",
        "test_response_continues_the_previous_one",
    ),
    (
        "llama.cpp#25515, text-generation-inference#3155, vllm#19862",
        "fields that are null are refused",
        "Takes null as absent, at every depth.",
        "tests/router/apis/test_null_fields.py",
        "test_null_equals_absent_in_every_object_of_a_body",
    ),
    (
        "litellm#29431",
        "`stream_options` comes without a stream",
        "Refuses it by name, as OpenAI does.",
        _REFUSALS,
        "test_front_refuses_bad_chat_by_name_of_field",
    ),
    (
        "vllm-swift#19",
        "`include_usage` of a stream is not honoured",
        "Sends the usage in a last chunk without choices.",
        "tests/e2e/test_openai.py",
        "test_streamed_completion_adds_up_to_that_of_grpc",
    ),
    (
        "dynamo#14850",
        "cached tokens are 0 in every chunk but the last",
        "Tells them from the first usage on.",
        _STREAMS,
        "test_running_usage_has_the_cached_tokens_from_the_first",
    ),
    (
        "sglang#40083",
        "keywords of a JSON schema that cannot be followed are ignored",
        "Refuses the schema, and names the keywords.",
        _SCHEMAS,
        "test_compile_rejects_a_bad_grammar_with_its_reason",
    ),
    (
        "rig#1362",
        "`content: []` beside `tool_calls` fails",
        "Takes it.",
        _CONVERSATIONS,
        "test_history_may_have_empty_lists",
    ),
    (
        "imp#1561, vllm#9593",
        "errors have no id of their request",
        "Sends `x-request-id` and `request-id` with every answer.",
        "tests/router/apis/test_http_routes.py",
        "test_every_answer_has_an_id_under_both_names",
    ),
    (
        "llama.cpp#18551",
        "streamed thoughts have no `signature_delta`",
        "Sends it right before the block ends.",
        _MESSAGES,
        "test_thought_is_signed_right_before_its_end",
    ),
    (
        "halogen-flash-server#84, software-agent-sdk#2512",
        "a call within a thought that does not end is lost",
        "Returns the calls that such a thought ends with.",
        "tests/router/text/test_reasoning_formats.py",
        "test_parser_returns_calls_that_an_open_thought_ends_with",
    ),
    (
        "llguidance#265",
        "`patternProperties` breaks a schema",
        "Refuses patterns that one name may match together, and names them.",
        _SCHEMAS,
        "test_compile_rejects_a_bad_grammar_with_its_reason",
    ),
    (
        "vllm#31501",
        "several tokens in one message lose arguments of a call",
        "Streams the same parts, however many tokens arrive together.",
        _CHAT,
        "test_streamed_chat_deltas_add_up_to_whole_answer",
    ),
    (
        "vllm#13978",
        "`tool_calls: []` in the history fails",
        "Takes it as absent.",
        _CONVERSATIONS,
        "test_history_may_have_empty_lists",
    ),
    (
        "anon-kode#60",
        "a template fails where turns of users and assistants do not alternate",
        "Joins adjacent turns of one role on `/v1/messages`, elsewhere for such templates.",
        _TEMPLATES,
        "test_normalised_turns_are_those_that_template_takes",
    ),
)


def reported_symptoms(symptoms: Sequence[Symptom] = SYMPTOMS) -> str:
    """Returns the page of the symptoms. Raises `ValueError` for a test that does not exist."""
    rows = []
    for reports, symptom, behaviour, path, test in symptoms:
        if test not in _tests_of(path):
            raise ValueError(
                f"the symptom of {reports} names {path}::{test}, which does not exist; expected "
                "the test that shows it. Correct docs/symptoms_reference.py"
            )
        shown = f"{code(test)} in {code(path)}"
        rows.append((reports, prose(symptom), prose(behaviour), shown))
    head = ("report", "symptom there", "Baton", "test")
    return page("Reported symptoms", _INTRODUCTION, table(head, rows))


@cache
def _tests_of(path: str) -> frozenset[str]:
    """Returns the names of the tests of a file, which is not imported."""
    tree = ast.parse((_ROOT / path).read_text(encoding="utf-8"))
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, functions))
