"""The statements of a gin text, by gin's own parser, which touches no state."""

import re
import tokenize

from gin.config_parser import BindingStatement
from gin.config_parser import BlockDeclaration
from gin.config_parser import ConfigParser
from gin.config_parser import ImportStatement
from gin.config_parser import IncludeStatement
from gin.config_parser import ParserDelegate

from meliad_rec.config.values import ConfigError
from meliad_rec.config.values import Macro
from meliad_rec.config.values import Reference

__all__ = [
  'DYNAMIC',
  'BindingStatement',
  'BlockDeclaration',
  'ImportStatement',
  'IncludeStatement',
  'statements',
]

DYNAMIC = 'from __gin__ import dynamic_registration'


class _Values(ParserDelegate):
  def configurable_reference(self, scoped_configurable_name, evaluate):
    *scope, name = scoped_configurable_name.rsplit('/', 1)
    return Reference(''.join(scope), name, evaluate)

  def macro(self, macro_name):
    return Macro(macro_name)


def statements(text: str, place):
  """The statements of a text, one by one.

  Args:
    text: of one file.
    place: from the number of a line to how messages call it.

  Raises:
    ConfigError: at the first that is not gin.
  """
  try:
    yield from ConfigParser(text, _Values())
  except tokenize.TokenError as error:
    reason, (line, _) = error.args
    raise ConfigError(f'{place(line)}: not gin, {reason}.') from error
  except SyntaxError as error:
    word = re.search(r"Failed to parse token '(\w+)'", error.msg)
    if word:
      word = word[1]
      reason = (
        f"{word} is no value; write '{word}' for a text, %{word} for a macro,"
        f' @{word} for a function or class'
      )
    else:
      reason = f'not gin, {error.msg.splitlines()[0].rstrip(".")}'
    line = (error.text or '').strip()
    reason += f', in "{line}"' if line else ''
    raise ConfigError(f'{place(error.lineno)}: {reason}.') from error
