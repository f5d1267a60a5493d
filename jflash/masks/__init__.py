"""Masks: which (query, key) pairs attend. README.md beside this file has the contract and a picture of each pattern."""

from jflash.masks.combine import And as And
from jflash.masks.combine import Not as Not
from jflash.masks.combine import Or as Or
from jflash.masks.function import MaskFn as MaskFn
from jflash.masks.mask import Mask as Mask
from jflash.masks.patterns import Causal as Causal
from jflash.masks.patterns import Chunked as Chunked
from jflash.masks.patterns import Dense as Dense
from jflash.masks.patterns import Dilated as Dilated
from jflash.masks.patterns import Full as Full
from jflash.masks.patterns import KeyRange as KeyRange
from jflash.masks.patterns import Lengths as Lengths
from jflash.masks.patterns import PrefixLM as PrefixLM
from jflash.masks.patterns import Segments as Segments
from jflash.masks.patterns import SlidingWindow as SlidingWindow
from jflash.masks.picture import plot as plot
from jflash.masks.tile_map import TileMap as TileMap
from jflash.masks.tree import Tree as Tree
from jflash.masks.varlen import packed as packed
