"""A store in memory that speaks Google Cloud Storage's JSON API, for tests.

TensorFlow, tensorstore and array_record reach it as they reach Google: in a
network namespace whose only network is loopback, `storage.googleapis.com` is
this machine, and a self-signed certificate is the libraries' own setting.

  with Bucket() as bucket:
    bucket.fault(latency=0.05)
    bucket.run([sys.executable, "-m", "vit_jax", "train", "--workdir=gs://bkt/a"])
    bucket.counts()

The same from a shell, with attributes of `Faults`; without COMMAND, `bash`:

  python tests/object_store.py run latency=0.05 share_503=0.05 -- COMMAND

Source: https://cloud.google.com/storage/docs/json_api/v1
"""

import base64
import collections
import contextlib
import dataclasses
import fcntl
import functools
import http.server
import json
import os
import pathlib
import random
import re
import shutil
import socket
import socketserver
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterator

HOSTS = ("storage.googleapis.com", "www.googleapis.com")
HTTPS, HTTP = 443, 8080  # ports in the namespace


@dataclasses.dataclass(frozen=True)
class Object:
  """What is stored under a name; a change makes a new one."""

  data: bytes
  generation: int
  time: float

  def resource(self, bucket: str, name: str) -> dict:
    """Returns what the API says of an object."""
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(self.time))
    at = f"{at}.{int(self.time % 1 * 1000):03d}Z"
    return {
      "name": name,
      "bucket": bucket,
      "size": str(len(self.data)),
      "generation": str(self.generation),
      "metageneration": "1",
      "timeCreated": at,
      "updated": at,
    }


@dataclasses.dataclass
class Faults:
  """What the store does to requests; shares are of all requests.

  Attributes:
    latency: Seconds before each answer.
    share_503: Share that is answered with 503, and not done.
    share_429: Share that is answered with 429, and not done.
    share_dropped: Share whose connection is closed, and not done.
    outage_until: Until this `time.time()` all are answered with 503.
    refuse_writes: Whether whatever changes an object is answered with 403.
  """

  latency: float = 0.0
  share_503: float = 0.0
  share_429: float = 0.0
  share_dropped: float = 0.0
  outage_until: float = 0.0
  refuse_writes: bool = False


class Refused(Exception):
  """An answer without success: its status and a reason."""


@dataclasses.dataclass
class Answer:
  """What a request gets, and what the log says of it."""

  kind: str
  name: str = ""
  body: dict | bytes = b""
  status: int = 200
  headers: dict[str, str] = dataclasses.field(default_factory=dict)


class Store:
  """Buckets of objects, and the requests that were made.

  Attributes:
    buckets: Objects by bucket and name; other buckets do not exist.
    faults: See there.
    log: For each request kind, object (BUCKET/NAME) and status.
    lock: Held while a request is answered.
  """

  def __init__(self, *buckets: str):
    self.buckets: dict[str, dict[str, Object]] = {b: {} for b in buckets}
    self.faults = Faults()
    self.log: list[dict] = []
    self.lock = threading.Lock()
    self._uploads: dict[str, tuple[str, dict]] = {}  # name and conditions
    self._random = random.Random(0)
    self._last_generation = 0

  def _fail(self, kind: str) -> bool:
    """Does the faults; returns whether the connection is closed instead."""
    f = self.faults
    time.sleep(f.latency)
    if time.time() < f.outage_until:
      raise Refused(503, "outage")
    with self.lock:
      chance = self._random.random()
    for status, share in ((503, f.share_503), (429, f.share_429)):
      if chance < share:
        raise Refused(status, "fault")
      chance -= share
    if chance < f.share_dropped:
      return True
    if f.refuse_writes and kind not in ("bucket", "stat", "read", "list"):
      raise Refused(403, "writes are refused")
    return False

  def answer(self, request: "Handler", body: bytes) -> Answer:
    """Does what is asked; the answer's status says whether it was right."""
    url = urllib.parse.urlsplit(request.path)
    query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
    parts = url.path.split("/")[1:]
    kind, bucket, name, act = self._route(request.command, parts, query)
    answer = Answer(kind, f"{bucket}/{name}")
    try:
      if self._fail(kind):
        answer.status = 0
        return answer
      with self.lock:
        if bucket not in self.buckets and kind != "unknown":
          raise Refused(404, f"the bucket {bucket} does not exist")
        act(answer, bucket, name, query, request.headers, body)
    except Refused as e:
      answer.status, reason = e.args
      answer.body = {"error": {"code": answer.status, "message": reason}}
    return answer

  def put(self, bucket: str, name: str, data: bytes) -> Object:
    """Stores an object."""
    now = time.time()  # generations grow, as Google's do
    self._last_generation = max(self._last_generation + 1, int(now * 1e6))
    found = Object(bytes(data), self._last_generation, now)
    self.buckets[bucket][name] = found
    return found

  def _route(self, method: str, parts: list[str], query: dict):
    """Returns (kind, bucket, object, method that answers)."""
    unquote = urllib.parse.unquote
    is_upload = parts[0] == "upload"
    parts = parts[1:] if parts[0] in ("upload", "download") else parts
    if parts[:3] != ["storage", "v1", "b"]:  # /BUCKET/OBJECT, of the XML API
      name = unquote("/".join(parts[1:]))
      if name and method in ("GET", "HEAD"):
        return "read", parts[0], name, self._read
      return "unknown", parts[0], name, self._unknown
    bucket, rest = unquote("".join(parts[3:4])), parts[4:]
    name = unquote("".join(rest[1:2]))
    if is_upload and "upload_id" in query:
      return "upload_part", bucket, "", self._upload_part
    if is_upload and query.get("uploadType") == "resumable":
      return "upload_start", bucket, query["name"], self._upload_start
    if is_upload:
      return "upload", bucket, query["name"], self._upload
    if len(rest) == 2 and query.get("alt") == "media":
      return "read", bucket, name, self._read
    acts = {
      ("GET", 0): ("bucket", self._bucket),
      ("GET", 1): ("list", self._list),
      ("GET", 2): ("stat", self._stat),
      ("DELETE", 2): ("delete", self._delete),
    }
    default = ("unknown", self._unknown)
    kind, act = acts.get((method, len(rest)), default)
    return kind, bucket, name, act

  def _put(self, bucket, name, data, query) -> dict:
    _check(query, self.buckets[bucket].get(name))
    return self.put(bucket, name, data).resource(bucket, name)

  def _get(self, bucket: str, name: str, query: dict) -> Object:
    found = self.buckets[bucket].get(name)
    wanted = query.get("generation")
    if found is None or wanted not in (None, str(found.generation)):
      raise Refused(404, f"no such object: {bucket}/{name}")
    _check(query, found)
    return found

  def _bucket(self, answer, bucket, *_):
    answer.body = {"name": bucket, "location": "US"}

  def _stat(self, answer, bucket, name, query, *_):
    answer.body = self._get(bucket, name, query).resource(bucket, name)

  def _unknown(self, *_):
    raise Refused(400, "this store does not know such requests")

  def _read(self, answer, bucket, name, query, headers, body):
    found = self._get(bucket, name, query)
    size = len(found.data)
    first, last = 0, size - 1
    wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", headers.get("Range", ""))
    if wanted:
      a, b = wanted.groups()
      first = int(a) if a else max(0, size - int(b))
      last = min(int(b), last) if a and b else last
      if first > last:
        raise Refused(416, f"got {wanted[0]} of {size} bytes")
      answer.status = 206
      answer.headers["Content-Range"] = f"bytes {first}-{last}/{size}"
    answer.body = found.data[first : last + 1]
    answer.headers |= {
      "Content-Type": "application/octet-stream",
      "x-goog-generation": str(found.generation),
      "x-goog-stored-content-length": str(size),
      "x-goog-stored-content-encoding": "identity",
    }

  def _list(self, answer, bucket, name, query, *_):
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
    start, end = query.get("startOffset", ""), query.get("endOffset")
    after = base64.urlsafe_b64decode(query.get("pageToken", "")).decode()
    most = min(1000, int(query.get("maxResults", 1000)))
    entries = {}  # the resource, or None for a prefix
    for key, found in self.buckets[bucket].items():
      if not key.startswith(prefix) or key < start or (end and key >= end):
        continue
      if delimiter and (i := key.find(delimiter, len(prefix))) >= 0:
        entries[key[: i + len(delimiter)]] = None
      else:
        entries[key] = found
    names = sorted(e for e in entries if e > after)
    page = names[:most]
    answer.name += prefix
    items = [entries[e].resource(bucket, e) for e in page if entries[e]]
    prefixes = [e for e in page if not entries[e]]
    answer.body = {"items": items, "prefixes": prefixes}
    if len(names) > most:
      token = base64.urlsafe_b64encode(page[-1].encode()).decode()
      answer.body["nextPageToken"] = token

  def _delete(self, answer, bucket, name, query, *_):
    self._get(bucket, name, query)
    del self.buckets[bucket][name]
    answer.status = 204

  def _upload(self, answer, bucket, name, query, headers, body):
    if query.get("uploadType") != "media":
      raise Refused(400, "this store knows no uploads in parts of one body")
    answer.body = self._put(bucket, name, body, query)

  def _upload_start(self, answer, bucket, name, query, headers, body):
    number = str(len(self._uploads))
    self._uploads[number] = name, query
    where = f"/upload/storage/v1/b/{bucket}/o?uploadType=resumable"
    answer.headers["Location"] = f"{where}&upload_id={number}"

  def _upload_part(self, answer, bucket, name, query, headers, body):
    name, conditions = self._uploads[query["upload_id"]]
    if headers.get("Content-Range", "").split("/")[-1] != str(len(body)):
      raise Refused(400, "this store wants all bytes of an upload at once")
    answer.name += name
    answer.body = self._put(bucket, name, body, conditions)


def _check(query: dict, found: Object | None) -> None:
  """Refuses a request whose condition on the generation is not met."""
  has = found.generation if found else 0
  want = query.get("ifGenerationMatch")
  if want is not None and int(want) != has:
    raise Refused(412, f"the generation is {has}, not {want}")
  want = query.get("ifGenerationNotMatch")
  if want is not None and int(want) == has:
    raise Refused(304, f"the generation is {has}")


class Handler(http.server.BaseHTTPRequestHandler):
  """Reads a request, lets the store answer, writes the log."""

  protocol_version = "HTTP/1.1"
  wbufsize = -1  # one packet for the headers
  disable_nagle_algorithm = True

  def _body(self) -> bytes:
    # TensorFlow's curl sends chunks *and* a Content-Length, which is of the
    # chunks' contents: who believes it stores objects that are cut.
    if "chunked" not in self.headers.get("Transfer-Encoding", ""):
      return self.rfile.read(int(self.headers.get("Content-Length", 0)))
    chunks = []
    while size := int(self.rfile.readline().split(b";")[0], 16):
      chunks.append(self.rfile.read(size))
      self.rfile.readline()
    while self.rfile.readline().strip():
      pass  # headers after the chunks
    return b"".join(chunks)

  def _serve(self):
    store: Store = self.server.store
    body = self._body()
    if self.path == "/log":  # for a command that counts its own requests
      self._send(Answer("log", body={"requests": store.log}))
      store.log = []
      return
    answer = store.answer(self, body)
    entry = {"kind": answer.kind, "object": answer.name}
    entry["status"] = answer.status
    store.log.append(entry)  # before the client goes on
    if answer.status:
      self._send(answer)
    else:
      self.close_connection = True

  do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve

  def _send(self, answer: Answer) -> None:
    has_body = answer.status not in (204, 304)
    data, headers = answer.body if has_body else b"", dict(answer.headers)
    if isinstance(data, dict):
      data = json.dumps(data).encode()
      headers["Content-Type"] = "application/json; charset=UTF-8"
    if "Location" in headers:
      scheme = "https" if self.server.is_secure else "http"
      headers["Location"] = (
        f"{scheme}://{self.headers['Host']}{headers['Location']}"
      )
    try:
      self.send_response(answer.status)
      for header in headers.items():
        self.send_header(*header)
      if has_body:
        self.send_header("Content-Length", str(len(data)))
      self.end_headers()
      if self.command != "HEAD":
        self.wfile.write(data)
      self.wfile.flush()
    except OSError:  # the client has left
      self.close_connection = True

  def handle_expect_100(self):
    is_welcome = super().handle_expect_100()
    self.wfile.flush()  # curl would wait for a second
    return is_welcome

  def log_message(self, *_):
    pass


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
  """Serves a store.

  Args:
    store: The store.
    listening: Where; None: at a free port of this machine.
    certificate: PEM file of key and certificate, for HTTPS.
  """

  daemon_threads = True

  def __init__(
    self,
    store: Store,
    listening: socket.socket | None = None,
    certificate: str = "",
  ):
    self.store, self.is_secure = store, bool(certificate)
    listening = listening or socket.create_server(("127.0.0.1", 0))
    address = listening.getsockname()
    super().__init__(address, Handler, bind_and_activate=False)
    self.socket.close()
    self.socket = listening
    if certificate:
      context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
      context.load_cert_chain(certificate)
      self.socket = context.wrap_socket(  # hands are shaken in the threads
        listening, server_side=True, do_handshake_on_connect=False
      )
    threading.Thread(
      target=self.serve_forever, args=(0.05,), daemon=True
    ).start()

  def handle_error(self, request, client_address):
    if not isinstance(sys.exception(), OSError):  # of a client that was killed
      super().handle_error(request, client_address)


def _enter_namespace(folder: str, number: str) -> None:
  """Gives the namespace its network and hosts; stays until stdin ends.

  Its ports are served by the process that has made it.

  Args:
    folder: Where the file of hosts is written.
    number: File descriptor that gets the listening sockets.
  """
  with socket.socket() as s:  # `ip link set lo up`
    flags = struct.pack("16sh22x", b"lo", 0x1 | 0x40)  # IFF_UP, IFF_RUNNING
    fcntl.ioctl(s, 0x8914, flags)  # SIOCSIFFLAGS
  hosts = pathlib.Path(folder, "hosts")
  names = ("localhost", socket.gethostname(), *HOSTS)
  hosts.write_text("".join(f"127.0.0.1 {name}\n" for name in names))
  subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)
  ports = [
    socket.create_server(("127.0.0.1", port), backlog=256)
    for port in (HTTPS, HTTP)
  ]
  with socket.socket(fileno=int(number)) as to:
    socket.send_fds(to, [b"ready"], [port.fileno() for port in ports])
  sys.stdin.read()


@functools.cache
def available() -> str:
  """Returns how a namespace can be made here, "" if it cannot."""
  if not all(map(shutil.which, ("unshare", "nsenter", "mount", "openssl"))):
    return ""
  for how in ("-nm", "-rnm"):
    mount = "mount --bind /etc/hosts /etc/hosts"
    tried = subprocess.run(
      ["unshare", how, "sh", "-c", mount], capture_output=True
    )
    if not tried.returncode:
      return how
  return ""


class Bucket:
  """A store of one bucket in a network namespace, and commands in it.

  What a test does by these methods is not counted, and does not fail.

  Args:
    name: The bucket's name; no other exists.
  """

  def __init__(self, name: str = "bkt"):
    self._name, self._store = name, Store(name)
    self._folder = tempfile.mkdtemp(prefix="object_store_")

  def __enter__(self):
    names = ",".join(f"DNS:{host}" for host in HOSTS)
    pem = f"{self._folder}/pem"
    subprocess.run(
      ["openssl", "req", "-x509", "-nodes", "-days", "2", "-subj", "/CN=x"]
      + ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
      + ["-addext", f"subjectAltName={names}", "-keyout", pem, "-out", pem],
      check=True,
      capture_output=True,
    )
    here, there = socket.socketpair()
    number = str(there.fileno())
    self._process = subprocess.Popen(
      ["unshare", available(), sys.executable, __file__]
      + ["namespace", self._folder, number],
      stdin=subprocess.PIPE,
      pass_fds=[there.fileno()],
    )
    there.close()
    with here:
      _, ports, *_ = socket.recv_fds(here, 16, 2)
    if len(ports) < 2:
      self._process.wait()
      raise RuntimeError("object_store.py: no namespace could be made")
    https, http = (socket.socket(fileno=port) for port in ports)
    self._servers = Server(self._store, https, pem), Server(self._store, http)
    return self

  def __exit__(self, *_):
    for server in self._servers:
      server.shutdown()
      server.server_close()
    self._process.communicate(b"")  # the end of its stdin is its end
    shutil.rmtree(self._folder, ignore_errors=True)

  def fault(self, outage: float = 0.0, **faults) -> None:
    """Sets `Faults`; those not named end.

    Args:
      outage: Seconds for which all requests are answered with 503.
      **faults: Attributes of `Faults`.
    """
    self._store.faults = Faults(outage_until=time.time() + outage, **faults)

  def requests(self) -> list[dict]:
    """Returns `Store.log`."""
    return list(self._store.log)

  def counts(self) -> dict[str, int]:
    """Returns the number of requests by kind, and their sum under "all"."""
    counts = collections.Counter(r["kind"] for r in self.requests())
    return {**counts, "all": counts.total()}

  def reset(self) -> None:
    """Empties the log."""
    self._store.log = []

  @contextlib.contextmanager
  def objects(self) -> Iterator[dict[str, Object]]:
    """The objects by name, in whose body no request is answered."""
    with self._store.lock:
      yield self._store.buckets[self._name]

  def get(self, name: str) -> bytes:
    """Returns an object."""
    with self.objects() as objects:
      return objects[name].data

  def put(self, name: str, data: bytes) -> None:
    """Stores an object."""
    with self.objects():
      self._store.put(self._name, name, data)

  def delete(self, prefix: str) -> None:
    """Removes all objects whose names begin so."""
    with self.objects() as objects:
      for name in [name for name in objects if name.startswith(prefix)]:
        del objects[name]

  def upload(self, folder: str | os.PathLike) -> None:
    """Stores all files of a folder."""
    for file in pathlib.Path(folder).rglob("*"):
      if file.is_file():
        self.put(file.relative_to(folder).as_posix(), file.read_bytes())

  def download(self, prefix: str, folder: str | os.PathLike) -> None:
    """Writes all objects under a prefix to a folder."""
    with self.objects() as objects:
      for name, found in objects.items():
        # Those that end so are TensorFlow's marks of folders.
        if name.startswith(prefix + "/") and not name.endswith("/"):
          file = pathlib.Path(folder, name.removeprefix(prefix + "/"))
          file.parent.mkdir(parents=True, exist_ok=True)
          file.write_bytes(found.data)

  def env(self, env: dict[str, str] | None = None) -> dict[str, str]:
    """Returns an environment, by default this process's, with the settings.

    Args:
      env: Another environment to start from.
    """
    env = dict(os.environ if env is None else env)
    env = {k: v for k, v in env.items() if not k.lower().endswith("_proxy")}
    local = f"http://127.0.0.1:{HTTP}"
    return env | {
      "CURL_CA_BUNDLE": f"{self._folder}/pem",  # TensorFlow
      "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",  # TensorFlow and tensorstore
      "NO_GCE_CHECK": "true",
      "TENSORSTORE_GCS_HTTP_URL": local,
      "CLOUD_STORAGE_EMULATOR_ENDPOINT": local,  # array_record
    }

  def _inside(self, command: list[str]) -> list[str]:
    enter = ["nsenter", "-n", "-m", f"-t{self._process.pid}"]
    if "r" in available():
      enter += ["-U", "--preserve-credentials"]
    # Another namespace of mounts begins in its root.
    return enter + ["sh", "-c", 'cd "$0" && exec "$@"', os.getcwd(), *command]

  def popen(self, command: list[str], env=None, **options) -> subprocess.Popen:
    """Starts a command in the namespace; its pid is the command's.

    Args:
      command: Program and arguments.
      env: Environment, to which `env` adds the settings.
      **options: As of subprocess.Popen.
    """
    return subprocess.Popen(self._inside(command), env=self.env(env), **options)

  def run(
    self, command: list[str], env=None, **options
  ) -> subprocess.CompletedProcess:
    """Runs a command in the namespace, see `popen` and subprocess.run."""
    return subprocess.run(self._inside(command), env=self.env(env), **options)


def _main() -> int:
  verb, *words = sys.argv[1:]
  if verb == "namespace":
    _enter_namespace(*words)
    return 0
  if not available():
    sys.exit("object_store.py: no network namespace can be made here")
  end = words.index("--") if "--" in words else len(words)
  faults = dict(word.split("=") for word in words[:end])
  with Bucket() as bucket:
    bucket.fault(**{k: json.loads(v) for k, v in faults.items()})
    code = bucket.run(words[end + 1 :] or ["bash"]).returncode
    print(f"requests: {bucket.counts()}", file=sys.stderr)
    return code


if __name__ == "__main__":
  sys.exit(_main())
