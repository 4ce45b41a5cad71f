"""Sources of classes for verl, written from its published interfaces, as files that import verl."""

FEEDBACK = '''
import threading
from typing import Any, Optional
from uuid import uuid4

from verl.interactions.base import BaseInteraction
from verl.utils.reward_score import gsm8k

LOG, GO = [], threading.Event()


class MathInteraction(BaseInteraction):
    """Says whether the number in the reply is right."""

    def __init__(self, config: dict):
        super().__init__(config)
        self.states = {}
        self.wrong = config.get("wrong", 0.0)

    async def start_interaction(self, instance_id: Optional[str] = None, ground_truth: str = "", **kwargs) -> str:
        instance_id = instance_id or str(uuid4())
        self.states[instance_id] = {"truth": ground_truth, "reply": "", "kwargs": kwargs}
        return instance_id

    async def generate_response(self, instance_id: str, messages: list, **kwargs) -> tuple[bool, str, float, dict]:
        reply = next(m["content"] for m in reversed(messages) if m["role"] == "assistant")
        if reply == "bug":
            raise KeyError(reply)
        if reply == "slow":
            GO.wait(60)
        if reply == "exit":
            raise SystemExit(3)
        if reply == "nothing":
            return False, " ", 0.0, {}
        self.states[instance_id]["reply"] = reply
        right = await self.calculate_score(instance_id) == 1.0
        return right, "Correct." if right else "Wrong, try again.", 1.0 if right else self.wrong, {}

    async def calculate_score(self, instance_id: str, **kwargs) -> float:
        state = self.states[instance_id]
        return gsm8k.compute_score(state["reply"], state["truth"], method="flexible")

    async def finalize_interaction(self, instance_id: str, **kwargs) -> None:
        LOG.append((self.name, len(self.states), self.states.pop(instance_id)["kwargs"]))


class Older:
    """Without a base class, async functions and ids."""

    def __init__(self, config):
        self.count = 0

    def start_interaction(self, query):
        self.query = query

    def generate_response(self, messages):
        self.count += 1
        return self.count == 2, f"{self.query} {len(messages)}", 0.25, {}

    def calculate_score(self):
        return self.count / 2

    def finalize_interaction(self):
        pass


class Strange(Older):
    def generate_response(self, messages):
        return "a text"


class NoUser(BaseInteraction):
    start_interaction = None


class Broken(BaseInteraction):
    def __init__(self, config):
        super().__init__(config)
        self.model = config["model"]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return gsm8k.compute_score(solution_str, ground_truth, method="strict", format_score=0.1)
'''

WEATHER = '''
import json, threading
from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

LOG, GO = [], threading.Event()


class WeatherTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.asked = {}

    async def create(self, instance_id: Optional[str] = None, **kwargs) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        self.asked[instance_id] = [*kwargs["create_kwargs"]["cities"]]
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        city = parameters["city"]
        if city == "Atlantis":
            raise ValueError("no such city")
        if city == "bug":
            raise KeyError(city)
        if city == "far":
            GO.wait(60)
        self.asked[instance_id].append(city)
        cities = " ".join(self.asked[instance_id])
        return ToolResponse(text=f"{cities}: {self.config['degrees']} degrees"), -0.05, {}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return 1.0 if "Paris" in self.asked[instance_id] else 0.0

    async def release(self, instance_id: str, **kwargs) -> None:
        LOG.append(" ".join(self.asked.pop(instance_id)))


class ClockTool(BaseTool):
    """An older one: parameters as JSON, responses as texts; it has its schema."""

    def get_openai_tool_schema(self):
        parameters = {"type": "object", "properties": {"zone": {"type": "string", "maxLength": 3}}, "required": []}
        function = {"name": "clock", "description": "The time.", "parameters": parameters}
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})

    async def create(self, instance_id: Optional[str] = None, **kwargs) -> str:
        return instance_id

    async def execute(self, instance_id: str, parameters: str, **kwargs) -> tuple[str, float, dict]:
        return "noon in " + json.loads(parameters).get("zone", "UTC"), 0.0, {}


class OldestTool(ClockTool):
    """Without ids."""

    def create(self, ground_truth):
        self.truth = ground_truth

    def execute(self, parameters: str):
        return json.loads(parameters)["zone"] + self.truth, 0.0, {}

    def release(self):
        pass


class LockedTool(ClockTool):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.lock = threading.Lock()


class FailingTool(ClockTool):
    def __init__(self, config, tool_schema):
        raise RuntimeError("no server")


class NoTool:
    pass
'''

TOOLS = """
tools:
  - class_name: {module}:WeatherTool
    config: {{type: native, degrees: 21}}
    tool_schema:
      type: function
      function:
        name: weather
        description: The weather.
        parameters: {{type: object, properties: {{city: {{type: string}}}}, required: [city]}}
  - class_name: {module}:ClockTool
    config: {{type: native}}
"""
