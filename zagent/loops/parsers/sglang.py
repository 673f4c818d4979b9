"""SGLang's formats. They are read in an engine's process: workers stay light, and one place has SGLang loaded."""

from __future__ import annotations

from typing import Any

from zagent.client.llm_client import AsyncLLMServerManager
from zagent.loops.parsers.base import FunctionCall, ParsedTurn

#: SGLang 0.5.23's names (`sglang.srt.function_call.parser_names`).
SGLANG_FORMATS = (
    *("apertus2509", "beam", "cohere_command4", "deepseekv3", "deepseekv31", "deepseekv32", "deepseekv4"),
    *("deepseekv41", "dots", "gemma4", "gigachat3", "gigachat35", "glm", "glm45", "glm47", "gpt-oss", "hermes"),
    *("hunyuan", "inkling", "interns1", "iquest_q1", "k2_horizon", "kimi_k2", "kimi_k3", "lfm2", "ling3", "llama3"),
    *("mimo", "minicpm5", "minimax-m2", "minimax-m3", "mistral", "muse", "nanbeige", "poolside_v1", "pythonic"),
    *("qwen", "qwen25", "qwen3_coder", "response_template", "spark25", "step3", "step3p5", "trinity"),
)


class SGLangParser:
    """Has an engine read the turn (`EngineServer.parse_tool_calls`)."""

    def __init__(self, format: str, llm: AsyncLLMServerManager) -> None:
        self._format = format
        self._llm = llm

    async def parse(self, text: str, schemas: list[dict[str, Any]]) -> ParsedTurn:
        """See `ToolParser`. Raises `TransientError` or `ConfigError` where no engine can do it."""
        content, calls = await self._llm.parse_tool_calls(self._format, text, schemas)
        return ParsedTurn(content, [FunctionCall(*call) for call in calls])
