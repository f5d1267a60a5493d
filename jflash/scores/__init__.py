"""What makes a logit of q·k besides scale, softcap and mask: bias, ALiBi, functions of the caller's, sinks;
and dropout of the weights.
"""

from jflash.scores.build import score_functions as score_functions
from jflash.scores.dropout import Dropout as Dropout
from jflash.scores.dropout import StreamedDropout as StreamedDropout
from jflash.scores.dropout import dropout_of as dropout_of
from jflash.scores.dropout import dropout_rate_of as dropout_rate_of
from jflash.scores.function import WHOLE as WHOLE
from jflash.scores.function import ScoreFunction as ScoreFunction
from jflash.scores.function import at_pairs as at_pairs
from jflash.scores.function import score_function as score_function
from jflash.scores.positions import by_position as by_position
from jflash.scores.streams import streamed as streamed
from jflash.scores.terms import ScoreTerms as ScoreTerms
from jflash.scores.terms import per_head as per_head
