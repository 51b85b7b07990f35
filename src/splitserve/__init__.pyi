from splitserve.orchestration.python.llm import LLM as LLM
from splitserve.orchestration.python.results import ChatCompletion as ChatCompletion
from splitserve.orchestration.python.results import Completion as Completion
from splitserve.orchestration.python.results import Output as Output
from splitserve.orchestration.python.results import PromptError as PromptError
from splitserve.orchestration.python.results import ToolCall as ToolCall
from splitserve.orchestration.python.results import Usage as Usage
from splitserve.orchestration.python.server import Server as Server
from splitserve.orchestration.python.server import launch as launch

__version__: str
