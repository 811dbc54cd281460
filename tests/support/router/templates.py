"""Chat templates, each with a peculiarity of one that models have."""

_TURN = "{{ '<' + m.role + '>' + m.content }}"
_CALLS = "{% for c in m.tool_calls or [] %}{{ '[' + c.function.name + ']' }}{% endfor %}"
_ARGUMENTS = (
    "{% for c in m.tool_calls or [] %}{{ '[' + c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}{{ ' ' + k + '=' ~ v }}{% endfor %}]"
    "{% endfor %}"
)
_END = "<assistant>"

# Renders any role alike, as most do, and reads arguments as an object.
GENERIC = "{% for m in messages %}" + _TURN + _ARGUMENTS + "{% endfor %}" + _END

# Renders nothing of a role that it does not know, as Qwen3's.
DROPPING = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant', 'tool') %}"
    + _TURN
    + _CALLS
    + "{% endif %}{% endfor %}"
    + _END
)

# Takes a system turn at the beginning alone, as Qwen3.5's.
STRICT_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system comes first') }}{% endif %}"
    "{% if m.role not in ('system', 'user', 'assistant', 'tool') %}"
    "{{ raise_exception('unexpected role') }}{% endif %}" + _TURN + _CALLS + "{% endfor %}" + _END
)

# Has one system prompt, the last one, as DeepSeek's.
LAST_SYSTEM = (
    "{% set ns = namespace(s='') %}"
    "{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = m.content %}{% endif %}"
    "{% endfor %}{{ ns.s }}{% for m in messages %}{% if m.role != 'system' %}"
    + _TURN
    + _CALLS
    + "{% endif %}{% endfor %}"
    + _END
)

# Takes a system's or a developer's turn at the beginning, as the developer's, and renders nothing
# of later ones, as gpt-oss'.
HARMONY_LIKE = (
    "{% for m in messages %}{% if loop.first and m.role in ('system', 'developer') %}"
    "{{ '<developer># Instructions ' + m.content }}"
    "{% elif m.role in ('user', 'assistant', 'tool') %}"
    + _TURN
    + _CALLS
    + "{% endif %}{% endfor %}"
    + _END
)

# Knows the user and the model alone.
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% elif m.role in ('user', 'assistant') %}" + _TURN + _CALLS + "{% endif %}{% endfor %}" + _END
)

# Wants turns of the user and the model in alternation, calls and results apart, as Mistral's.
ALTERNATING = (
    "{% set ns = namespace(at=0) %}{% for m in messages %}"
    "{% if m.role in ('user', 'assistant') and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.at % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.at = ns.at + 1 %}"
    "{% elif m.role not in ('tool', 'assistant') and not (m.role == 'system' and loop.first) %}"
    "{{ raise_exception('unexpected role') }}{% endif %}" + _TURN + _CALLS + "{% endfor %}" + _END
)
