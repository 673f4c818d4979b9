"""A judge: a second pool of engines with a model of its own, asked by a reward function.

    python -m zagent.launch --prompts P.jsonl --out O.jsonl \\
        services.judge.model.path=smollm2-135m reward.function=examples.services.judge.judged

`services.judge.engine.*` says how it is served (count, args, gpus …), like `engine.*` for the policy. Its GPUs are
those that the policy's engines leave.
"""

from __future__ import annotations

import re
from typing import Any

#: A judge that thinks longer than this has nothing to say; its row then fails, or goes without a score
#: (`reward.on_error`).
TIMEOUT_S = 120.0
QUESTION = """Grade an answer from 0 (wrong) to 10 (right and complete). Reply with the number only.

Expected: {expected}
Answer: {answer}"""


async def judged(
    data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any, services: Any
) -> dict[str, Any]:
    """``score`` from 0 to 1, and the judge's own words; a reply without a number scores 0."""
    question = QUESTION.format(expected=ground_truth, answer=solution_str)
    judge = services["judge"].bind(timeout=TIMEOUT_S)
    reply = await judge.chat([{"role": "user", "content": question}], {"max_new_tokens": 8, "temperature": 0})
    return {"score": grade(reply), "judge_reply": reply}


def grade(reply: str) -> float:
    """The first number of ``reply`` between 0 and 10, as a fraction."""
    found = re.search(r"\b(10|\d)\b", reply)
    return int(found[0]) / 10 if found else 0.0
