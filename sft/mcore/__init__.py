"""The model and the training engine.  Only this package imports megatron and transformer_engine.

On import, megatron-core prints warnings that do not concern the user of this trainer: for example, that Apex is missing
or that one of its classes is deprecated.  This module silences these warnings before any module of megatron-core is
imported.  In the comments of this package, core means megatron-core.
"""

import logging
import warnings

warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")
warnings.filterwarnings("ignore", message=r"Please use DTensor instead")
warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
logging.getLogger("megatron").setLevel(logging.ERROR)
logging.getLogger("torch.utils.cpp_extension").setLevel(
    logging.ERROR
)  # core imports torch's module, which warns on a CPU that there is no CUDA
