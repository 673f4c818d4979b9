"""`Services`: user actors, and engines with models of their own, called by the name of their pool."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from zagent.client.calls import Calls
from zagent.client.llm_client import AsyncLLMServerManager
from zagent.errors import UnknownService
from zagent.types import Ids, TokenOutput

#: The pending table of a link, or an async function that gives one for the running loop.
CallsHere: TypeAlias = "Calls | Callable[[], Awaitable[Calls]]"


class ServicePool:
    """The processes of one service. The public methods of its class are methods here:
    ``await services["sandbox"].run(code, limit=3)``.

    Arguments and results are None, bools, numbers, strings, bytes, lists, dicts and numpy arrays of these (a tuple
    arrives as a list). What the method raises is raised here, as the same class where it is a builtin or one of
    zagent's, else as `RemoteError`; the service's traceback is its cause. Cancelling the call cancels the method.

    Raises:
        UnknownMethod: lists the public methods.
        DeadlineExceeded: the time given to `bind` is over.
        MemberLost: the process died while it had the call, and the method is not `idempotent`.
        PoolLost: all processes of the service are gone, and their restarts used up.
    """

    def __init__(self, calls: CallsHere, name: str, session: str = "", timeout: float | None = None) -> None:
        self._calls = calls
        self._name = name
        self._session = session
        self._timeout = timeout

    def bind(self, session: str | None = None, timeout: float | None = None) -> ServicePool:
        """The same service for calls of one ``session``, which go to one process while it lives, and of ``timeout``
        seconds each, all attempts together. What is left out stays as it is."""
        return type(self)(
            self._calls,
            self._name,
            self._session if session is None else session,
            self._timeout if timeout is None else timeout,
        )

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(f"{method!r} is not public, so it is no method of a service")

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._call(method, [list(args), kwargs])

        return call

    def __repr__(self) -> str:
        return f"<service {self._name!r}>"

    async def _call(self, method: str, argument: Any) -> Any:
        calls = await self._table()
        return await calls.call(self._name, method, argument, session=self._session, timeout=self._timeout)

    async def _end_session(self) -> None:
        (await self._table()).end_session(self._name, self._session)

    async def _table(self) -> Calls:
        return self._calls if isinstance(self._calls, Calls) else await self._calls()


class EnginePool(ServicePool):
    """A service that is a pool of engines with a model of its own (a judge, a teacher)."""

    async def generate(
        self, request_id: str, prompt_ids: Ids, sampling_params: dict[str, Any], **media: Any
    ) -> TokenOutput:
        """Tokens in, tokens out: `AsyncLLMServerManager.generate` on this pool."""
        engines = AsyncLLMServerManager(self._calls, self._timeout, self._name)
        return await engines.generate(request_id, prompt_ids, sampling_params, **media)

    async def chat(self, messages: list[dict[str, Any]], sampling_params: dict[str, Any] | None = None) -> str:
        """The model's answer to ``messages`` as text, without special tokens; its own chat template and tokenizer.

        Raises:
            InvalidRequest: messages the template cannot render, an unknown sampling key, too long …
        """
        answer: str = await self._call("chat", [messages, sampling_params or {}])
        return answer


class Services(Mapping[str, ServicePool]):
    """The cluster's services by name: ``services["sandbox"].run(code)``.

    Args:
        calls: the pending table of a link, or an async function that gives one for the running loop.
        names: of all services.
        session: calls with the same one go to the same process of a service while it lives; "" = each to the least
            busy one.
        timeout: seconds one call may take in all; None = no limit.
        engines: those of ``names`` that are pools of engines.
    """

    def __init__(
        self,
        calls: CallsHere,
        names: Iterable[str],
        session: str = "",
        timeout: float | None = None,
        engines: Iterable[str] = (),
    ) -> None:
        self._calls, self._session, self._timeout = calls, session, timeout
        engines = set(engines)
        self._kinds = {name: EnginePool if name in engines else ServicePool for name in names}
        self._used: dict[str, ServicePool] = {}

    @classmethod
    def configured(cls, calls: CallsHere, section: Mapping[str, Any]) -> Services:
        """Those of the configuration's section `services` as plain data; ``{name: {"model": …}}`` is enough of it."""
        return cls(calls, section, engines=[name for name, service in section.items() if service.get("model")])

    def bind(self, session: str | None = None, timeout: float | None = None) -> Services:
        """The same services with another session, another timeout; what is left out stays as it is."""
        return Services(
            self._calls,
            self._kinds,
            self._session if session is None else session,
            self._timeout if timeout is None else timeout,
            [name for name, kind in self._kinds.items() if kind is EnginePool],
        )

    async def end_session(self) -> None:
        """The session is over: the broker may forget which processes had it."""
        used, self._used = self._used, {}
        if self._session:
            for pool in used.values():
                await pool._end_session()

    def __getitem__(self, name: str) -> ServicePool:
        if name not in self._kinds:
            known = ", ".join(self._kinds) or "none"
            raise UnknownService(f"no service {name!r} in this cluster, there is: {known}")
        pool = self._used.get(name)
        if pool is None:
            pool = self._used[name] = self._kinds[name](self._calls, name, self._session, self._timeout)
        return pool

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)

    def __repr__(self) -> str:
        return f"<services {', '.join(self._kinds) or 'none'}>"
