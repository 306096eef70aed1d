"""The OpenAI routes over the real queue, with a worker that says what it is told."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from polygraft.card import ModelCard
from polygraft.openai.catalog import ModelCatalog, ServedModel
from polygraft.openai.chat import ChatRenderer
from polygraft.openai.errors import install_error_handlers
from polygraft.openai.inference import Inference, Observer
from polygraft.openai.routes import build_router
from polygraft.openai.tokenizer import ModelTokenizer
from polygraft.queue.gateway import GatewayQueue
from polygraft.tenancy.admissions import Admissions
from polygraft.tenancy.principal import TENANT_SCOPES, Principal
from polygraft_adapters.types import ModuleShapes

from .fakes import FakeRegistry, FakeWorker, NullObserver, saying

PRINCIPAL = Principal("key_1", "ten_1", "acme", TENANT_SCOPES)
SPECIAL = ("<s>", "</s>", "<|start|>", "<|end|>")

CHAT = (
    "{{ bos_token }}{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
STRICT = (
    "{% for message in messages %}"
    "{% if message.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('Role ' ~ message.role ~ ' not supported') }}{% endif %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ message.content }}{% endfor %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A byte-level BPE: four special tokens, all bytes, and a few words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["Hello, world! Your answer: Yes", "the quick brown fox"] * 3, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def tokenizers(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tokenizer files by digest: `plain`, and `bos`, which begins raw text with <s>."""
    folder = tmp_path_factory.mktemp("tokenizers")
    tokenizer.save(str(folder / "plain"))
    begins = Tokenizer.from_str(tokenizer.to_str())
    begins.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    begins.enable_truncation(4)
    begins.enable_padding(length=12)
    begins.save(str(folder / "bos"))
    return folder


@pytest.fixture(scope="session")
def cards() -> Mapping[str, ModelCard]:
    """`base`; `bos`, whose tokenizer writes a BOS as its template does; `strict`, whose template refuses much; `bare`,
    which has no template; `short`, of 8 tokens; `narrow`, which has fewer embeddings than its tokenizer has tokens.
    """
    base = ModelCard(
        name="base",
        created=7,
        max_model_len=512,
        max_context=256,
        vocab_size=320,
        eos_token_ids=(1,),
        bos_token=None,
        eos_token="</s>",
        chat_template=CHAT,
        tokenizer="plain",
        modules=ModuleShapes(layers=1, shapes={"q_proj": (4, 4)}, base_model="base"),
        max_loras=4,
        max_lora_rank=16,
        numerics_id="n",
    )

    def card(name: str, **changes: object) -> ModelCard:
        fields = {field: getattr(base, field) for field in base.__struct_fields__}
        return ModelCard(**(fields | {"name": name} | changes))

    return {
        "base": base,
        "bos": card("bos", bos_token="<s>", tokenizer="bos"),
        "strict": card("strict", chat_template=STRICT),
        "bare": card("bare", chat_template=None),
        "narrow": card("narrow", vocab_size=100),
        "short": card("short", max_context=8, chat_template="{{ messages[0].content }}"),
    }


@pytest.fixture(scope="session")
def served(cards: Mapping[str, ModelCard], tokenizers: Path) -> Iterator[Callable[[str], ServedModel]]:
    """A model by name, without a queue."""
    with ThreadPoolExecutor(1) as threads:
        yield lambda name: ServedModel(cards[name], ModelTokenizer(tokenizers / cards[name].tokenizer, threads))


@pytest.fixture(scope="session")
def renderer() -> Iterator[ChatRenderer]:
    """One process for all tests; it is started again when a template ended it."""
    renderer = ChatRenderer()
    yield renderer
    renderer.close()


@pytest.fixture
def worker(valkey: str, cards: Mapping[str, ModelCard], tokenizer: Tokenizer) -> Iterator[FakeWorker]:
    """Serves all models; says "Hello, world!" until told otherwise."""
    worker = FakeWorker(valkey, cards, saying(tokenizer, "Hello, world!"))
    worker.start()
    yield worker
    worker.stop()


class _Authenticated:
    """Stands for the gateway's authentication."""

    def __init__(self, app: ASGIApp, principal: Principal, admissions: Admissions) -> None:
        self._app = app
        self._principal = principal
        self._admissions = admissions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._admissions.during(self._principal) as admission:
            scope.setdefault("state", {}).update(principal=self._principal, admission=admission)
            await self._app(scope, receive, send)


@contextlib.asynccontextmanager
async def running_app(
    valkey: str,
    cards: Mapping[str, ModelCard],
    tokenizers: Path,
    renderer: ChatRenderer,
    *,
    observer: Observer | None = None,
    principal: Principal = PRINCIPAL,
) -> AsyncIterator[FastAPI]:
    """The app over a queue of its own, with short keep-alives; everybody is `principal`."""
    queue = await GatewayQueue.connect(valkey, "gateway-1")
    inference = Inference(
        queue=queue,
        resolver=FakeRegistry(cards, {"pirate": 3}),
        catalog=ModelCatalog(lambda: cards, lambda digest: tokenizers / digest),
        gateway_id="gateway-1",
        renderer=renderer,
        observer=NullObserver() if observer is None else observer,
        keep_alive=0.3,
    )
    app = FastAPI()
    install_error_handlers(app)
    app.include_router(build_router(inference))
    app.state.admissions = Admissions()
    app.add_middleware(_Authenticated, principal=principal, admissions=app.state.admissions)
    yield app
    await queue.close()
    inference.catalog.close()


@pytest.fixture
async def client(
    valkey: str, cards: Mapping[str, ModelCard], tokenizers: Path, renderer: ChatRenderer, worker: FakeWorker
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app, without a socket."""
    async with running_app(valkey, cards, tokenizers, renderer) as app:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            yield client


@pytest.fixture
def server(
    valkey: str, cards: Mapping[str, ModelCard], tokenizers: Path, renderer: ChatRenderer, worker: FakeWorker
) -> Iterator[str]:
    """The URL of a real uvicorn that serves the app."""
    started: list[uvicorn.Server] = []
    ready = threading.Event()

    async def serve() -> None:
        async with running_app(valkey, cards, tokenizers, renderer) as app:
            server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", ws="none", lifespan="off"))
            started.append(server)
            serving = asyncio.create_task(server.serve())
            while not server.started:  # noqa: ASYNC110 - it has nothing to wait for
                await asyncio.sleep(0.01)
            ready.set()
            await serving

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(20)
    port = started[0].servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    started[0].should_exit = True
    thread.join()
