"""Secrets in URLs, options and servers' answers: in no message, no cause, no repr and no log."""

from __future__ import annotations

import base64
import http.server
import io
import logging
import pickle
import re
import threading
import traceback
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from dcp_fsdp_osd.storage import StreamingReader, StreamingWriter, latest
from dcp_fsdp_osd.storage.location import resolve
from dcp_fsdp_osd.storage.redact import cleaned, display_url, redact, url_secrets
from dcp_fsdp_osd.storage.store import Store, StoreConfig
from dcp_fsdp_osd.storage.transfer import RetryPolicy
from tests.storage.attacks.case import Attack, Gives
from tests.storage.conftest import Place

SECRET = "hunter2/+=&x"  # a URL quotes it
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl"

# Text as a client or a server may write it -> what of it is secret
TEXTS = (
    ("s3://me:p@ss@host/x", "p@ss"),
    ("sftp://me:p/a?s#s@host/x", "p/a?s#s"),
    ("https://ghp_aaaaaaaaaaaaaaaaaaaaaaaaaaaa@host/x", "ghp_"),
    ("unknown+x://me:secretpw@host", "secretpw"),
    ("proxy http://u:pw123@proxy:80 failed", "pw123"),
    ("https://a.blob.core.windows.net/c?sv=1&sig=AbC%2Fd&se=2", "AbC%2Fd"),
    ("https://h/x?api_key=k12345", "k12345"),
    ("https://h/x?apikey=k12345&b=1", "k12345"),
    ("https://h/x?a=1&key=AbCdE12345", "AbCdE12345"),
    ("?X-Amz-Credential=AK/1/s3&X-Amz-Security-Token=tok1", "AK/1"),
    ("?X-Amz-Credential=AK/1/s3&X-Amz-Security-Token=tok1", "tok1"),
    ("?X-Amz-Signature=abc123", "abc123"),
    ("?X-Goog-Signature=abc123", "abc123"),
    ("AccountName=a;AccountKey=c2VjcmV0==;EndpointSuffix=x", "c2VjcmV0"),
    ("SharedAccessSignature=sv=1&sig=zzz", "zzz"),
    ("{'key': 'AKxyz', 'secret': 'it''s'}", "AKxyz"),
    ("{'secret': \"it's one\"}", "it's one"),
    ('{"client_secret": "abc\\"def"}', "def"),
    ("S3FileSystem(key=None, secret='sss111')", "sss111"),
    ("headers={'Authorization': 'Bearer tok999999'}", "tok999999"),
    ("Authorization: AWS4-HMAC-SHA256 Credential=AK/1, Signature=f00", "f00"),
    ("authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
    ("Cookie: session=abcdef", "abcdef"),
    ("<Code>X</Code><AWSAccessKeyId>AKID1</AWSAccessKeyId>", "AKID1"),
    ("<StringToSign>AWS4\nabc</StringToSign>", "abc"),
    ("<Token-0>FwoGZXIv</Token-0>", "FwoGZXIv"),
    ("<SignatureProvided>5e6</SignatureProvided>", "5e6"),
    ("id AKIAIOSFODNN7EXAMPLE is unknown", "AKIAIOSFODNN7EXAMPLE"),
    ("id ASIAIOSFODNN7EXAMPLE is unknown", "ASIAIOSFODNN7EXAMPLE"),
    (f"got {JWT}", "eyJzdWIi"),
    ("hf_abcdefghijklmnopqrstuvwx", "hf_abc"),
    ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----", "MIIE"),
)
# What is no secret and has to stay readable
PLAIN = (
    "s3://bucket/a@b/c", "http://localhost:9000/a@b", "abfs://container@account.dfs.core/x",
    "no checkpoint at s3://bucket/run-1: .metadata does not exist", "/data/user@host/x",
    "optim.state.tok_embeddings.weight: expected (3, 5), found (5, 3)",
    "NoSuchKey: The specified key does not exist", "KeyError: 'step'",
    "rank 0 gave up after 3 tries: OSError: [Errno 5] Input/output error",
    "An error occurred (ExpiredToken) when calling the GetObject operation",
)  # fmt: skip


def by_shape(place: Place) -> Any:
    shown = [(text, redact(text, {})) for text, secret in TEXTS if secret in redact(text, {})]
    urls = [
        (url, display_url(url))
        for url in ("sftp://me:p 'a\"ss@host/x", "s3://AK:se/cr@b/x", "https://h/x?sig=a'b")
        if any(secret in display_url(url) for secret in ("p 'a", "ss@", "se/cr", "=a"))
    ]
    changed = [(text, redact(text, {})) for text in PLAIN if redact(text, {}) != text]
    return shown, urls, changed


def by_option(place: Place) -> Any:
    """Values of options, in whatever form a client quotes them."""
    options: Mapping[str, Any] = {
        "secret_access_key": SECRET,
        "connection_string": "c0nnection",
        "auth": ("someone", "pa55word"),
        "headers": {"X-Auth": b"tok\xffen1"},
        "client_options": {"default_headers": {"Authorization": ["h3ader"]}},
        "region": "us-east-1",
    }
    text = " ".join(
        [
            SECRET, quote(SECRET), quote(SECRET, safe=""), repr(SECRET), "c0nnection", "pa55word",
            "h3ader", "us-east-1",
        ]
    )  # fmt: skip
    return sorted(set(redact(text, options).replace("'***'", "***").split()))


class Leaky:
    """A store whose client puts all it knows into its errors, as causes and contexts too."""

    def __init__(self, config: StoreConfig, kind: type[Exception]) -> None:
        self.config, self.kind = config, kind

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            words = [str(value) for value in self.config.options.values()]
            try:
                try:
                    raise ValueError("inner", *words, self.config.url)
                except ValueError:
                    raise ConnectionError(f"middle {words}")  # noqa: B904 - a context is told too
            except ConnectionError as error:
                raise self.kind(
                    " ".join([*words, *url_secrets(self.config.url).values()])
                ) from error

        return call

    def is_transient(self, error: BaseException) -> bool:
        return False

    def close(self) -> None:
        pass


class Unpicklable(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def everything_of(error: BaseException) -> str:
    """All that anybody may get to see of an error."""
    seen: list[BaseException] = []
    todo: list[BaseException | None] = [error]
    texts = []
    while todo:
        link = todo.pop()
        if link is None or any(link is other for other in seen):
            continue
        seen.append(link)
        texts += [str(link), repr(link), str(vars(link))]
        todo += [link.__cause__, link.__context__]
        if isinstance(link, CheckpointException):
            todo += [failure[0] for failure in link.failures.values()]
    texts.append("".join(traceback.format_exception(error)))
    return "\n".join(texts)


def nested(place: Place) -> Any:
    """Through the reader, the writer and latest, with the log of all libraries beside them."""
    url = "sftp://me:p@ss/w0rd@host/run?api_key=k3y12"
    options = {"secret": SECRET, "token": "t0ken"}
    secrets = (SECRET, quote(SECRET, safe=""), "t0ken", "p@ss/w0rd", "w0rd", "k3y12")
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger().addHandler(handler)
    found = []
    try:
        for kind in (OSError, FileNotFoundError, PermissionError, EOFError, Unpicklable):

            def backend(config: StoreConfig, kind: type[Exception] = kind) -> Store:
                return Leaky(config, kind)  # type: ignore[return-value]

            given: Any = {"backend": backend, "storage_options": options}
            reader = StreamingReader(url, **given, retry=RetryPolicy(tries=1))
            writer = StreamingWriter(url, **given, retry=RetryPolicy(tries=1))
            calls = (
                lambda reader=reader: dcp.load({"t": torch.ones(1)}, storage_reader=reader),
                lambda writer=writer: dcp.save({"t": torch.ones(1)}, storage_writer=writer),
                lambda given=given: latest(url, **given),
            )
            for number, call in enumerate(calls):
                try:
                    call()
                except BaseException as error:  # CheckpointException is one
                    text = everything_of(error)
                    found += [(kind.__name__, number, s) for s in secrets if s in text]
                else:
                    found.append((kind.__name__, number, "no error"))
            shown = " ".join(map(repr, (reader, writer, reader._session, writer._session.config)))
            shown += reader.checkpoint_id + str(writer.storage_meta())
            found += [(kind.__name__, "repr", secret) for secret in secrets if secret in shown]
    finally:
        logging.getLogger().removeHandler(handler)
    return found + [("log", secret) for secret in secrets if secret in log.getvalue()]


def likeness(place: Place) -> Any:
    """An error that shows nothing is itself; one that does keeps its class and its chain."""
    plain = FileNotFoundError("x")
    assert cleaned(plain, {"secret": SECRET}) is plain
    error = FileNotFoundError(f"x {SECRET}")
    error.__cause__ = Unpicklable(SECRET)
    made = cleaned(error, {"secret": SECRET})
    assert made.__cause__ is not None
    pickle.loads(pickle.dumps(made))
    return type(made).__name__, str(made), type(made.__cause__).__name__, made.__context__ is None


class _Echo(http.server.BaseHTTPRequestHandler):
    """Refuses everything, and quotes the request's headers, as S3 servers do."""

    def _answer(self) -> None:
        said = "".join(f"<{k}>{v}</{k}>" for k, v in self.headers.items())
        body = f"<Error><Code>AccessDenied</Code><Message>{said}</Message></Error>".encode()
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer

    def log_message(self, *args: Any) -> None:
        pass


def quoted_by_a_server(place: Place) -> Any:
    """A real client against a server that answers with the headers that it was sent."""
    assert place.endpoint is not None
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        endpoint = place.endpoint.behind(f"http://127.0.0.1:{server.server_port}")
        if place.kind == "s3fs":
            options = {**endpoint.storage_options, "token": "t0ken-of-session"}
        else:
            options = {**endpoint.obstore_options, "session_token": "t0ken-of-session"}
        reader = StreamingReader(place.url, backend=place.backend, storage_options=options)
        try:
            dcp.load({"t": torch.ones(1)}, storage_reader=reader)
        except BaseException as error:
            text = everything_of(error)
            secrets = ("t0ken-of-session", re.escape(endpoint.secret_key), r"Signature=(?!\*\*\*)")
            return [secret for secret in secrets if re.search(secret, text)]
    finally:
        server.shutdown()
        server.server_close()
    return "no error"


def refused_urls(place: Place) -> Any:
    """Refusals quote the URL, too."""
    texts = []
    for url in (
        "s3://me:pa55@b/../x",
        "https://h/x?sig=pa55",
        "a::s3://me:pa55@b",
        "s3:/me:pa55@b",
    ):
        try:
            resolve(url)
        except Exception as error:
            texts.append(everything_of(error))
    basic = base64.b64encode(b"me:pa55").decode()
    return len(texts), [text for text in texts if "pa55" in text or basic in text]


CASES = [
    Attack("secrets by their shape", attack=by_shape, must=Gives(([], [], [])), on=("local",)),
    Attack(
        "secrets by the options' names", attack=by_option, must=Gives(["***", "us-east-1"]),
        on=("local",),
    ),
    Attack("secrets in nested errors and logs", attack=nested, must=Gives([]), on=("local",)),
    Attack(
        "what stands for an error that shows a secret",
        attack=likeness,
        must=Gives(("FileNotFoundError", "x ***", "StorageError", True)),
        on=("local",),
    ),
    Attack(
        "a server that quotes the request", attack=quoted_by_a_server, must=Gives([]),
        on=("s3fs", "obstore"),
    ),
    Attack("refused URLs", attack=refused_urls, must=Gives((4, [])), on=("local",)),
]  # fmt: skip
