"""How a model's text becomes tool calls: parsers by name (`multi_turn.format`)."""

from zagent.loops.parsers.base import FunctionCall as FunctionCall
from zagent.loops.parsers.base import ParsedTurn as ParsedTurn
from zagent.loops.parsers.base import ToolParser as ToolParser
from zagent.loops.parsers.registry import find_parser as find_parser
from zagent.loops.parsers.registry import parser_names as parser_names
from zagent.loops.parsers.registry import register_parser as register_parser
