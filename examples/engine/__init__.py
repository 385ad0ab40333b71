"""A small engine of one's own: a Llama that loads a Hugging Face checkpoint and quantizes it on the way.

Reading order: `layers` (where olq comes in), `model` (the rest of it and `load_weights`), `loader`,
`generate`.
"""

from .config import LlamaConfig as LlamaConfig
from .generate import generate as generate
from .loader import load_model as load_model
from .loader import load_plain as load_plain
from .loader import load_tokenizer as load_tokenizer
from .loader import read_checkpoint as read_checkpoint
from .model import Llama as Llama
from .perplexity import perplexity as perplexity
