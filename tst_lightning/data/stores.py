"""Files and directories in object stores: ``s3://`` and ``gs://`` URLs. Light until something is read.

S3 is spoken through boto3, as LitData does for its index: obstore, which LitData reads the windows with, does not
survive a fork, so the main process must leave it alone. Google's is spoken through obstore.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from tst_lightning.errors import UserError

SCHEMES = ("s3", "gs")
CONNECT_SECONDS, READ_SECONDS, ATTEMPTS = 10, 60, 6


class StoreError(OSError):
    """A store does not do what was asked of it: one line that says what, and the way out."""

    def __init__(self, message: str) -> None:
        # A DataLoader makes the error of a worker anew, with the worker's traceback for a message.
        super().__init__(re.sub(rf"^{re.escape(__name__)}\.\w+: ", "", message.strip().rpartition("\n")[2]))


class MissingObject(StoreError):
    """There is no such object."""


class NoAnswer(StoreError):
    """The store or the network is down or overloaded, which may pass."""


@dataclass(frozen=True)
class StorePath(os.PathLike[str]):
    """A file or directory in a store, used as a :class:`pathlib.Path` is.

    Attributes:
        url: ``SCHEME://BUCKET/KEY``, without a slash at the end.
    """

    url: str

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(f"{self.url}/{name}")

    def __fspath__(self) -> str:
        return self.url

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]

    @property
    def key(self) -> str:
        """What the bucket calls it."""
        return self.url.split("/", 3)[3]

    def read_bytes(self) -> bytes:
        """The file's content.

        Raises:
            MissingObject: if there is no such file.
            StoreError: if it cannot be read.
        """
        content = BytesIO()
        self.download(content)
        return content.getvalue()

    def download(self, file: BinaryIO) -> None:
        """Write the content into ``file``; what is raised is that of :meth:`read_bytes`."""
        with store_errors(self.url):
            self._bucket().get(self.key, file)

    def sizes(self) -> dict[str, int]:
        """Names, relative to this directory, and sizes of all files under it; empty if there are none.

        Raises:
            StoreError: if the bucket cannot be read.
        """
        prefix = f"{self.key}/"
        with store_errors(self.url):
            return {key.removeprefix(prefix): size for key, size in self._bucket().list(prefix)}

    def upload(self, path: Path, *, advance: Callable[[int], None], sha256: str | None = None) -> None:
        """Make the file of what a local one holds; it appears when it is complete.

        Args:
            path: the local file.
            advance: is told the bytes sent, again and again, from several threads.
            sha256: kept beside the file, for :meth:`sha256`.

        Raises:
            StoreError: if it cannot be written.
        """
        with store_errors(self.url):
            self._bucket().put(self.key, path, advance, {} if sha256 is None else {"sha256": sha256})

    def sha256(self) -> str | None:
        """The hash that was given when the file was uploaded; None if there was none, or no file."""
        try:
            with store_errors(self.url):
                return self._bucket().metadata(self.key).get("sha256")
        except MissingObject:
            return None

    def _bucket(self) -> Bucket:
        scheme, _, rest = self.url.partition("://")
        # by process, as neither library's client may be used behind a fork
        return _bucket(scheme, rest.partition("/")[0], os.getpid())


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` names something in a store, of a kind that is known or not."""
    return "://" in os.fspath(path)


def locate(path: str | os.PathLike[str]) -> Path | StorePath:
    """A local path, or one in a store if it is a URL.

    Raises:
        UserError: for a URL that names nothing in a known store.
    """
    text = os.fspath(path)
    if not is_url(text):
        return Path(text)
    scheme, _, rest = text.partition("://")
    bucket, _, key = rest.strip("/").partition("/")
    if scheme not in SCHEMES:
        known = " or ".join(f"{name}://BUCKET/DIRECTORY" for name in SCHEMES)
        raise UserError(f"{text}: stores of this kind are not known: give a local directory, {known}")
    if not bucket or not key or "//" in key:
        raise UserError(f"{text} names no directory in a bucket: give {scheme}://BUCKET/DIRECTORY")
    return StorePath(f"{scheme}://{bucket}/{key}")


def litdata_options(path: StorePath) -> dict[str, Any]:
    """LitData's ``storage_options``: it would try a thousand times to reach an endpoint that is down."""
    return {"config": _s3_config()} if path.url.startswith("s3://") else {}


class Bucket(Protocol):
    """What is asked of a store's client. Errors are the client's own."""

    def get(self, key: str, file: BinaryIO) -> None:
        """Write an object's content into ``file``."""

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Keys and sizes."""

    def put(self, key: str, path: Path, advance: Callable[[int], None], metadata: Mapping[str, str]) -> None:
        """Write a file into an object."""

    def metadata(self, key: str) -> Mapping[str, str]:
        """What was given to ``put``."""


class S3Bucket:
    """Amazon's S3, and whatever speaks its protocol where ``AWS_ENDPOINT_URL`` points."""

    def __init__(self, name: str) -> None:
        import boto3

        self.name = name
        self.client = boto3.Session().client("s3", config=_s3_config())
        endpoint = self.client.meta.endpoint_url
        if not endpoint.startswith("https:"):
            raise StoreError(
                f"s3://{name}: the endpoint {endpoint} is not encrypted, and LitData reads from https:// only: set "
                "AWS_ENDPOINT_URL to an https:// one (SSL_CERT_FILE and AWS_CA_BUNDLE name a certificate of your own)"
            )

    def get(self, key: str, file: BinaryIO) -> None:
        """Write an object's content into ``file``."""
        self.client.download_fileobj(self.name, key, file, Config=_one_thread())

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Keys and sizes."""
        for page in self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix):
            yield from ((entry["Key"], entry["Size"]) for entry in page.get("Contents", ()))

    def put(self, key: str, path: Path, advance: Callable[[int], None], metadata: Mapping[str, str]) -> None:
        """Write a file into an object, in several parts if it is large."""
        extra = {"Metadata": dict(metadata)}
        self.client.upload_file(str(path), self.name, key, ExtraArgs=extra, Callback=advance, Config=_one_thread())

    def metadata(self, key: str) -> Mapping[str, str]:
        """What was given to ``put``."""
        found: Mapping[str, str] = self.client.head_object(Bucket=self.name, Key=key)["Metadata"]
        return found


class GoogleBucket:
    """Google Cloud Storage, with the application's default credentials."""

    def __init__(self, name: str) -> None:
        from obstore.store import GCSStore

        self.store = GCSStore(name)

    def get(self, key: str, file: BinaryIO) -> None:
        """Write an object's content into ``file``."""
        import obstore

        for block in obstore.get(self.store, key):
            file.write(block)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Keys and sizes."""
        import obstore

        for page in obstore.list(self.store, prefix):
            yield from ((entry["path"], entry["size"]) for entry in page)

    def put(self, key: str, path: Path, advance: Callable[[int], None], metadata: Mapping[str, str]) -> None:
        """Write a file into an object, in several parts if it is large."""
        import obstore

        obstore.put(self.store, key, path, attributes=dict(metadata))
        advance(path.stat().st_size)

    def metadata(self, key: str) -> Mapping[str, str]:
        """What was given to ``put``."""
        import obstore

        attributes = obstore.get(self.store, key, options={"head": True}).attributes
        return {name: value for name, value in attributes.items() if isinstance(name, str)}


@contextmanager
def store_errors(url: str) -> Iterator[None]:
    """Turn the libraries' errors into a :class:`StoreError` with the way out."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        known = _in_words(error, url)
        if known is None:
            raise
        raise known from error


@functools.lru_cache
def _bucket(scheme: str, name: str, process: int) -> Bucket:
    return S3Bucket(name) if scheme == "s3" else GoogleBucket(name)


def _s3_config() -> Any:
    from botocore.config import Config

    return Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        retries={"mode": "standard", "max_attempts": ATTEMPTS},
        # the newer default, checksums in chunked trailers, is beyond many S3-compatible stores
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )


def _one_thread() -> Any:
    from boto3.s3.transfer import TransferConfig

    return TransferConfig(use_threads=False)  # several files are under way at once


_DENIED = {
    *("401", "403", "AccessDenied", "Forbidden", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"),
    *("InvalidToken", "PermissionDeniedError", "UnauthenticatedError"),
}


def _in_words(error: Exception, url: str) -> StoreError | None:
    """What a library's error means to the user; None for one that is no store's."""
    library = type(error).__module__.partition(".")[0] in ("boto3", "botocore", "s3transfer", "obstore", "google")
    name, text = type(error).__name__, " ".join(str(error).split())
    cut = isinstance(error, OSError) and text.startswith("Short ")  # LitData 0.2.76 of an answer that is too short
    missing = isinstance(error, FileNotFoundError) and text.startswith("Object at ")  # obstore 0.12, a builtin
    if not (library or cut or missing):
        return None
    # What the store says, apart from names and times, which may hold anything.
    response = getattr(error, "response", None)
    codes = {name, *re.findall(r"An error occurred \((\w+)\)|<Code>(\w+)</Code>|status code: (\d+)", text)}
    codes = {part for code in codes for part in (code if isinstance(code, tuple) else (code,)) if part}
    if isinstance(response, dict) and "Error" in response:
        codes.add(str(response["Error"]["Code"]))
    words = re.sub(r"\S*/\S*", "", text).lower()
    short = text if len(text) <= 200 else f"{text[:200]} ..."
    if "NoSuchBucket" in codes:
        bucket = "/".join(url.split("/")[:3])
        return MissingObject(
            f"{url}: there is no bucket {bucket} at this endpoint: check its name and AWS_ENDPOINT_URL"
        )
    if missing or codes & {"NoSuchKey", "NotFoundError", "NotFound", "404"}:
        return MissingObject(f"{url} does not exist: check the name, or prepare and upload it again")
    if "SSLError" in codes or "certificate" in words:
        return StoreError(
            f"{url}: the endpoint's certificate is not trusted: name its authority's file by both SSL_CERT_FILE and "
            "AWS_CA_BUNDLE"
        )
    if codes & {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "DefaultCredentialsError"}:
        return StoreError(f"{url}: no credentials were found: {_credentials_way_out(url)}")
    if denied := codes & _DENIED:  # the store's own word is the best
        word = min(denied, key=lambda code: (code.isdigit(), code.endswith("Error"), code))
        return StoreError(f"{url}: access is denied ({word}): {_credentials_way_out(url)}")
    if codes & {"PermanentRedirect", "AuthorizationHeaderMalformed", "301"} or "configured region" in words:
        return StoreError(f"{url}: the bucket lies in another region: set AWS_DEFAULT_REGION ({short})")
    if cut or codes & {"InvalidRange", "416"}:
        return StoreError(f"{url} is shorter than its index says: it was cut or changed: upload the corpus again")
    if url.startswith("gs://") and "metadata.google.internal" in text:  # where a machine of Google's has its own
        return StoreError(f"{url}: no credentials were found: {_credentials_way_out(url)}")
    return NoAnswer(
        f"{url}: the store does not answer as it should, also after several tries ({short}): check the network and "
        "AWS_ENDPOINT_URL, and try again"
    )


def _credentials_way_out(url: str) -> str:
    if url.startswith("gs://"):
        return "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`"
    return "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE) to keys that may read this bucket"
