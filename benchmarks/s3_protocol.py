"""What the benchmark's S3 server does with a request: the S3 protocol, without sockets."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from email.utils import formatdate
from urllib.parse import quote, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from benchmarks.s3_memory import Arena, Body

__all__ = ["Failure", "Reply", "Request", "Service"]


@dataclass
class Stored:
    """An object: its bodies one after the other (the parts of a multipart upload)."""

    bodies: list[Body]
    etag: str
    modified: float
    size: int = 0

    def __post_init__(self) -> None:
        self.size = sum(body.size for body in self.bodies)


@dataclass
class Reply:
    """``ranged`` is (object, start, stop) of a body that is sent from the arena."""

    status: int = 200
    text: bytes = b""
    headers: list[tuple[str, str]] = field(default_factory=list)
    ranged: tuple[Stored, int, int] | None = None
    kind: str = "other"


@dataclass
class Request:
    method: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Body


class Failure(Exception):
    """An S3 error answer."""

    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(code)
        self.status, self.code, self.message = status, code, message or code

    def reply(self) -> Reply:
        text = f"<Error><Code>{self.code}</Code><Message>{escape(self.message)}</Message></Error>"
        return Reply(self.status, text.encode())


class Limiter:
    """Bytes a second over all connections: a caller sleeps until its bytes' turn has come."""

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self._next = 0.0
        self._lock = threading.Lock()

    def pay(self, count: int) -> None:
        if self.rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._next = max(self._next, now) + count / self.rate
            wait = self._next - now
        time.sleep(wait)


class Service:
    """Buckets and what is being uploaded.  Bodies move outside the lock, everything else in it."""

    def __init__(self, arena: Arena, *, latency: float, bandwidth: float | None) -> None:
        self.arena = arena
        self.latency = latency
        self.limiter = Limiter(bandwidth)
        self.buckets: dict[str, dict[str, Stored]] = {}
        self.uploads: dict[str, tuple[str, str, dict[int, Stored]]] = {}
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()
        self._serial = itertools.count(1)

    def count(self, reply: Reply, received: int) -> None:
        with self.lock:
            self.counts["requests"] += 1
            self.counts[reply.kind] += 1
            self.counts["bytes_in"] += received
            if reply.ranged is not None:
                self.counts["bytes_out"] += reply.ranged[2] - reply.ranged[1]

    def side(self, request: Request) -> Reply:
        """The side endpoint: counters and settings, as JSON."""
        with self.lock:
            result: dict[str, object] = dict(self.counts)
            if request.bucket == "_reset":
                self.counts.clear()
            elif request.bucket == "_config":
                settings = json.loads(_text(request.body))
                self.latency = float(settings["latency"])
                self.limiter = Limiter(settings["bandwidth"])
                result = settings
        return Reply(text=json.dumps(result).encode())

    def handle(self, request: Request) -> Reply:
        try:
            with self.lock:
                return self._route(request)
        except Failure as failure:
            return failure.reply()

    def _route(self, request: Request) -> Reply:  # noqa: PLR0911 (a table of routes)
        method, query = request.method, request.query
        if not request.bucket:
            names = "".join(f"<Bucket><Name>{name}</Name></Bucket>" for name in self.buckets)
            return _xml("ListAllMyBucketsResult", f"<Buckets>{names}</Buckets>")
        if not request.key:
            return self._bucket(request)
        objects = self._objects(request.bucket)
        if method in ("GET", "HEAD"):
            if "uploadId" in query:
                return self._list_parts(query["uploadId"])
            return _get(request, self._find(objects, request.key))
        if method == "PUT":
            return self._put(request, objects)
        if method == "POST" and "uploads" in query:
            upload = f"upload-{next(self._serial)}"
            self.uploads[upload] = (request.bucket, request.key, {})
            inner = f"<Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key>"
            inner += f"<UploadId>{upload}</UploadId>"
            return _xml("InitiateMultipartUploadResult", inner, kind="create_upload")
        if method == "POST" and "uploadId" in query:
            return self._complete(request, objects)
        if method == "DELETE" and "uploadId" in query:
            if self.uploads.pop(query["uploadId"], None) is None:
                raise Failure(404, "NoSuchUpload")
            return Reply(204, kind="abort_upload")
        if method == "DELETE":
            objects.pop(request.key, None)
            return Reply(204, kind="delete")
        raise Failure(501, "NotImplemented", f"{method} {request.key} {sorted(query)}")

    def _bucket(self, request: Request) -> Reply:  # noqa: PLR0911
        method, query = request.method, request.query
        if method == "PUT":
            self.buckets.setdefault(request.bucket, {})
            return Reply()
        objects = self._objects(request.bucket)
        if method == "HEAD":
            return Reply()
        if method == "DELETE":
            del self.buckets[request.bucket]
            return Reply(204)
        if method == "POST" and "delete" in query:
            names = [
                node.text or ""
                for node in ElementTree.fromstring(_text(request.body)).iter()
                if node.tag.rpartition("}")[2] == "Key"
            ]
            for name in names:
                objects.pop(name, None)
            done = "".join(f"<Deleted><Key>{escape(name)}</Key></Deleted>" for name in names)
            return _xml("DeleteResult", done, kind="bulk_delete")
        if method == "GET" and "location" in query:
            return Reply(text=b"<LocationConstraint></LocationConstraint>")
        if method == "GET" and "uploads" in query:
            found = "".join(
                f"<Upload><Key>{escape(key)}</Key><UploadId>{upload}</UploadId></Upload>"
                for upload, (bucket, key, _) in self.uploads.items()
                if bucket == request.bucket and key.startswith(query.get("prefix", ""))
            )
            return _xml("ListMultipartUploadsResult", found + "<IsTruncated>false</IsTruncated>")
        if method == "GET":
            return _list(request, objects)
        raise Failure(501, "NotImplemented", f"{method} of a bucket with {sorted(query)}")

    def _objects(self, bucket: str) -> dict[str, Stored]:
        if bucket not in self.buckets:
            raise Failure(404, "NoSuchBucket", bucket)
        return self.buckets[bucket]

    def _find(self, objects: dict[str, Stored], key: str) -> Stored:
        if key not in objects:
            raise Failure(404, "NoSuchKey", key)
        return objects[key]

    def _store(self, bodies: list[Body]) -> Stored:
        return Stored(bodies, f'"{next(self._serial):032x}"', time.time())

    def _put(self, request: Request, objects: dict[str, Stored]) -> Reply:
        if "uploadId" in request.query:
            upload = self.uploads.get(request.query["uploadId"])
            if upload is None:
                raise Failure(404, "NoSuchUpload")
            part = self._store([request.body])
            upload[2][int(request.query["partNumber"])] = part
            return Reply(headers=[("ETag", part.etag)], kind="put_part")
        _check_conditions(request, objects.get(request.key))
        source = request.headers.get("x-amz-copy-source")
        if source is None:
            stored = objects[request.key] = self._store([request.body])
            return Reply(headers=[("ETag", stored.etag)], kind="put")
        bucket, _, key = unquote(source).lstrip("/").partition("/")
        found = self._find(self._objects(bucket), key)
        stored = objects[request.key] = self._store(found.bodies)
        inner = f"<ETag>{escape(stored.etag)}</ETag>"
        inner += f"<LastModified>{_iso(stored.modified)}</LastModified>"
        return _xml("CopyObjectResult", inner, kind="copy")

    def _complete(self, request: Request, objects: dict[str, Stored]) -> Reply:
        upload = self.uploads.get(request.query["uploadId"])
        if upload is None:
            raise Failure(404, "NoSuchUpload")
        _check_conditions(request, objects.get(request.key))
        numbers = [
            int(node.text or "")
            for node in ElementTree.fromstring(_text(request.body)).iter()
            if node.tag.rpartition("}")[2] == "PartNumber"
        ]
        if not numbers or numbers != sorted(numbers) or any(n not in upload[2] for n in numbers):
            raise Failure(400, "InvalidPart", str(numbers))
        bodies = [body for number in numbers for body in upload[2][number].bodies]
        stored = objects[request.key] = self._store(bodies)
        del self.uploads[request.query["uploadId"]]
        inner = f"<Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key>"
        inner += f"<ETag>{escape(stored.etag)}</ETag>"
        return _xml("CompleteMultipartUploadResult", inner, kind="complete_upload")

    def _list_parts(self, upload_id: str) -> Reply:
        if upload_id not in self.uploads:
            raise Failure(404, "NoSuchUpload")
        inner = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(part.etag)}</ETag>"
            f"<Size>{part.size}</Size></Part>"
            for number, part in sorted(self.uploads[upload_id][2].items())
        )
        return _xml("ListPartsResult", inner + "<IsTruncated>false</IsTruncated>", kind="list")


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))


def _xml(tag: str, inner: str, *, kind: str = "other") -> Reply:
    space = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{tag} {space}>{inner}</{tag}>'
    return Reply(text=text.encode(), headers=[("Content-Type", "application/xml")], kind=kind)


def _text(body: Body) -> bytes:
    return b"".join(bytes(body.arena.view[o : o + n]) for o, n in body.extents(0, body.size))


def _check_conditions(request: Request, present: Stored | None) -> None:
    match, none_match = (request.headers.get(h) for h in ("if-match", "if-none-match"))
    if none_match is not None and present is not None:
        if request.method in ("GET", "HEAD"):
            if none_match in ("*", present.etag):
                raise Failure(304, "NotModified")
        elif none_match in ("*", present.etag):
            raise Failure(412, "PreconditionFailed")
    if match is not None and (present is None or match not in ("*", present.etag)):
        raise Failure(412, "PreconditionFailed")


def _get(request: Request, stored: Stored) -> Reply:
    _check_conditions(request, stored)
    headers = [
        ("ETag", stored.etag),
        ("Last-Modified", formatdate(stored.modified, usegmt=True)),
        ("Accept-Ranges", "bytes"),
        ("Content-Type", "binary/octet-stream"),
    ]
    start, stop, status = 0, stored.size, 200
    wanted = request.headers.get("range")
    if wanted is not None:
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        if first:
            start, stop = int(first), min(stored.size, int(last) + 1 if last else stored.size)
        else:
            start = max(0, stored.size - int(last))
        if start >= stop:
            raise Failure(416, "InvalidRange", wanted)
        status = 206
        headers.append(("Content-Range", f"bytes {start}-{stop - 1}/{stored.size}"))
    if request.method == "HEAD":
        return Reply(status, headers=[*headers, ("Content-Length", str(stop - start))], kind="head")
    return Reply(status, headers=headers, ranged=(stored, start, stop), kind="get")


def _list(request: Request, objects: dict[str, Stored]) -> Reply:
    query = request.query
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    limit = min(int(query.get("max-keys", "1000")), 1000)
    second = query.get("list-type") == "2"
    after = query.get("continuation-token") or query.get("start-after") or query.get("marker", "")
    quoted = quote if query.get("encoding-type") == "url" else escape
    seen: dict[str, str] = {}
    last, truncated = "", False
    for key in sorted(name for name in objects if name.startswith(prefix) and name > after):
        inside = key[len(prefix) :]
        folder = prefix + inside.partition(delimiter)[0] + delimiter if delimiter else ""
        folded = bool(delimiter) and delimiter in inside
        name = folder if folded else key
        if name in seen or (folded and after.startswith(folder)):
            last = key
            continue
        if len(seen) == limit:
            truncated = True
            break
        last = key
        if folded:
            seen[name] = f"<CommonPrefixes><Prefix>{quoted(folder)}</Prefix></CommonPrefixes>"
        else:
            stored = objects[key]
            seen[name] = (
                f"<Contents><Key>{quoted(key)}</Key><Size>{stored.size}</Size>"
                f"<ETag>{escape(stored.etag)}</ETag><StorageClass>STANDARD</StorageClass>"
                f"<LastModified>{_iso(stored.modified)}</LastModified></Contents>"
            )
    inner = f"<Name>{request.bucket}</Name><Prefix>{quoted(prefix)}</Prefix>"
    inner += f"<MaxKeys>{limit}</MaxKeys><IsTruncated>{str(truncated).lower()}</IsTruncated>"
    if delimiter:
        inner += f"<Delimiter>{escape(delimiter)}</Delimiter>"
    if query.get("encoding-type"):
        inner += "<EncodingType>url</EncodingType>"
    inner += f"<KeyCount>{len(seen)}</KeyCount>" if second else ""
    if truncated:
        tag = "NextContinuationToken" if second else "NextMarker"
        inner += f"<{tag}>{escape(last)}</{tag}>"
    return _xml("ListBucketResult", inner + "".join(seen.values()), kind="list")
