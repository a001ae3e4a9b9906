"""Chat templates with the role rules of published ones, shortened.

By kind: which roles are refused, which are left out silently, and where.
"""

_ANSWER = """\
{%- macro answer(m) %}{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}{% endmacro %}"""
_ENDS = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
_ALTERNATE = """\
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}"""
_CHATML_TOOLS = """\
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + answer(m) + '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"""
_FIRST = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {%- for tool in tools %}{{- '<tools>' + (tool | tojson) + '</tools>' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}"""

# A later system message is a turn; a developer's is left out.
QWEN3 = f"""\
{_ANSWER}{_FIRST}
{{%- for m in messages %}}
    {{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}}
        {{{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}}}
{_CHATML_TOOLS}
    {{%- endif %}}
{{%- endfor %}}
{_ENDS}"""

# One system message, first; no developer; somewhere a user.
QWEN35 = f"""\
{_ANSWER}
{{%- if not (messages | selectattr('role', 'equalto', 'user') | list) %}}
    {{{{- raise_exception('No user query found in messages.') }}}}
{{%- endif %}}{_FIRST}
{{%- for m in messages %}}
    {{%- if m.role == 'system' %}}
        {{%- if not loop.first %}}
            {{{{- raise_exception('System message must be at the beginning.') }}}}
        {{%- endif %}}
    {{%- elif m.role == 'user' %}}
        {{{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}}}
{_CHATML_TOOLS}
    {{%- else %}}
        {{{{- raise_exception('Unexpected message role.') }}}}
    {{%- endif %}}
{{%- endfor %}}
{_ENDS}"""

# No system message; turns alternate.
GEMMA2 = f"""\
{{%- if messages[0].role == 'system' %}}{{{{- raise_exception('System role not supported') }}}}{{%- endif %}}
{{%- for m in messages %}}
{_ALTERNATE}
    {{{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}}}
    {{{{- m.content | trim + '<end_of_turn>\\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<start_of_turn>model\\n' }}}}{{%- endif %}}"""

# A system message begins the first user's; turns alternate.
GEMMA3 = f"""\
{{%- set prefix, rest = '', messages %}}
{{%- if messages[0].role == 'system' %}}
    {{%- set prefix, rest = messages[0].content + '\\n\\n', messages[1:] %}}
{{%- endif %}}
{{%- for m in rest %}}
{_ALTERNATE}
    {{{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}}}
    {{{{- (prefix if loop.first else '') + m.content | trim + '<end_of_turn>\\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<start_of_turn>model\\n' }}}}{{%- endif %}}"""

# One system message, first; turns without calls and what they returned alternate.
MISTRAL = """\
{%- set rest = messages %}
{%- if messages[0].role == 'system' %}
    {{- '[SYSTEM_PROMPT]' + messages[0].content + '[/SYSTEM_PROMPT]' }}
    {%- set rest = messages[1:] %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for m in rest %}
    {%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
        {%- if (m.role == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('After the optional system message, roles must alternate.') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
    {%- if m.role == 'user' %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.role == 'assistant' %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {%- if call.id | length < 9 %}{{- raise_exception('nine letters or digits') }}{%- endif %}
            {{- '[TOOL_CALLS]' + (call.function | tojson) }}
        {%- endfor %}
        {{- '</s>' }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Only user, assistant and tool roles are supported.') }}
    {%- endif %}
{%- endfor %}"""

# Any role, by its name.
LLAMA3 = """\
{%- set text, rest = '', messages %}
{%- if messages[0].role == 'system' %}
    {%- set text, rest = messages[0].content | trim, messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + text + '<|eot_id|>' }}
{%- for m in rest %}
    {%- set role = 'ipython' if m.role == 'tool' else m.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + m.content | trim }}
    {%- for call in m.tool_calls or [] %}{{- call.function | tojson }}{%- endfor %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# Instructions of a developer or the system, first; later ones are left out.
GPT_OSS = """\
{%- set rest = messages %}
{%- if messages[0].role in ('developer', 'system') %}
    {{- '<|start|>developer<|message|># Instructions\\n\\n' + messages[0].content + '<|end|>' }}
    {%- set rest = messages[1:] %}
{%- endif %}
{%- for m in rest %}
    {%- if m.role == 'assistant' %}
        {%- if m.content %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
        {%- endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '<|start|>assistant to=' + (call.function | tojson) }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>functions to=assistant<|message|>' + m.content + '<|end|>' }}
    {%- elif m.role == 'user' %}
        {{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

ROLE_TEMPLATES = {
    "qwen3": QWEN3,
    "qwen35": QWEN35,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "mistral": MISTRAL,
    "llama3": LLAMA3,
    "gpt_oss": GPT_OSS,
}
NO_TOOLS = ("gemma2", "gemma3")
