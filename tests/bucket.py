"""A stand-in for Google Cloud Storage: gs://NAME is a folder of this machine.

epath uses it through a backend. tensorstore, which writes the arrays, uses a
server with the part of the JSON API of Cloud Storage that it needs.
"""

import contextlib
import http.server
import json
import os
from pathlib import Path
import sys
import threading
from types import SimpleNamespace
from urllib import parse

from etils.epath import backend
from etils.epath import gpath


@contextlib.contextmanager
def served(folder: Path, monkeypatch):
  """Makes gs://NAME the folder folder/NAME while the body runs."""
  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), _Handler)
  server.root = folder
  url = f'http://127.0.0.1:{server.server_port}'
  monkeypatch.setenv('TENSORSTORE_GCS_HTTP_URL', url)
  monkeypatch.setenv('GOOGLE_AUTH_TOKEN_FOR_TESTING', 'token')
  monkeypatch.setattr(gpath.backend_lib, 'tf_backend', _Backend(folder))
  # orbax only asks whether a bucket has hierarchical folders.
  client = SimpleNamespace(get_bucket=lambda name: name)
  storage = SimpleNamespace(Client=lambda: client)
  monkeypatch.setitem(sys.modules, 'google.cloud.storage', storage)
  thread = threading.Thread(target=server.serve_forever, daemon=True)
  thread.start()
  try:
    yield
  finally:
    server.shutdown()
    server.server_close()
    thread.join()


class _Backend(type(backend.os_backend)):
  """Operations of a bucket: no appending, and no empty folders."""

  def __init__(self, folder):
    self._folder = folder

  def _here(self, path):
    path = os.fspath(path)
    assert path.startswith('gs://'), path
    return str(self._folder / path.removeprefix('gs://'))

  def open(self, path, mode):
    assert 'a' not in mode, f'{path} cannot be appended to.'
    if 'w' in mode:
      Path(self._here(path)).parent.mkdir(parents=True, exist_ok=True)
    return backend.os_backend.open(self._here(path), mode)

  def glob(self, path):
    found = backend.os_backend.glob(self._here(path))
    return ['gs://' + os.path.relpath(each, self._folder) for each in found]


def _one(name):
  def call(self, path, *args, **kwargs):
    method = getattr(backend.os_backend, name)
    return method(self._here(path), *args, **kwargs)

  return call


def _two(name):
  def call(self, path, dst, *args, **kwargs):
    method = getattr(backend.os_backend, name)
    return method(self._here(path), self._here(dst), *args, **kwargs)

  return call


_ONE = ['exists', 'isdir', 'listdir', 'makedirs', 'mkdir', 'rmtree', 'remove']
for _name in [*_ONE, 'stat']:
  setattr(_Backend, _name, _one(_name))
for _name in ['rename', 'replace', 'copy']:
  setattr(_Backend, _name, _two(_name))


class _Handler(http.server.BaseHTTPRequestHandler):
  """Objects as files; their generation is the time of modification."""

  protocol_version = 'HTTP/1.1'

  def log_message(self, *_):
    pass

  def _request(self):
    """Returns (bucket's folder, object's name or '', query)."""
    url = parse.urlsplit(self.path)
    parts = url.path.partition('/storage/v1/b/')[2].split('/', 2)
    name = parse.unquote(parts[2]) if len(parts) > 2 else ''
    query = dict(parse.parse_qsl(url.query))
    return self.server.root / parts[0], name, query

  def _answer(self, code, content=b'', **headers):
    if not isinstance(content, bytes):
      content = json.dumps(content).encode()
    self.send_response(code)
    for key, value in headers.items():
      self.send_header(key.replace('_', '-'), value)
    self.send_header('Content-Length', str(len(content)))
    self.end_headers()
    self.wfile.write(content)

  def _wrong_generation(self, file, query):
    """Returns whether the object has another generation than requested."""
    now = _generation(file)
    if query.get('ifGenerationMatch', now) != now:
      self._answer(412)
      return True
    return False

  def do_GET(self):
    bucket, name, query = self._request()
    if not name:
      return self._answer(200, {'items': _listed(bucket, query)})
    file = bucket / name
    if not file.is_file():
      return self._answer(404)
    if self._wrong_generation(file, query):
      return None
    if query.get('ifGenerationNotMatch') == _generation(file):
      return self._answer(304)
    marks = {'x_goog_generation': _generation(file)}
    content = file.read_bytes()
    if 'Range' not in self.headers:
      return self._answer(200, content, **marks)
    first, _, last = self.headers['Range'].partition('=')[2].partition('-')
    if first:
      first = int(first)
      last = min(int(last or len(content)), len(content) - 1)
    else:
      first, last = max(len(content) - int(last), 0), len(content) - 1
    marks['Content_Range'] = f'bytes {first}-{last}/{len(content)}'
    return self._answer(206, content[first : last + 1], **marks)

  def do_POST(self):
    bucket, _, query = self._request()
    content = self.rfile.read(int(self.headers['Content-Length']))
    file = bucket / query['name']
    if self._wrong_generation(file, query):
      return
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    self._answer(200, _facts(bucket, file))

  def do_DELETE(self):
    bucket, name, query = self._request()
    if not (bucket / name).is_file():
      self._answer(404)
    elif not self._wrong_generation(bucket / name, query):
      (bucket / name).unlink()
      self._answer(204)


def _generation(file):
  return str(file.stat().st_mtime_ns) if file.is_file() else '0'


def _facts(bucket, file):
  return {
    'name': file.relative_to(bucket).as_posix(),
    'generation': _generation(file),
    'size': str(file.stat().st_size),
  }


def _listed(bucket, query):
  prefix = query.get('prefix', '')
  first, last = query.get('startOffset', ''), query.get('endOffset')
  found = (path for path in bucket.rglob('*') if path.is_file())
  items = (_facts(bucket, path) for path in found)
  return sorted(
    (
      each
      for each in items
      if each['name'].startswith(prefix)
      and first <= each['name']
      and (not last or each['name'] < last)
    ),
    key=lambda each: each['name'],
  )
