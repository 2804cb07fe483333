"""The wall, the only package that imports megatron or transformer_engine.

On import, core prints warnings that do not concern the user of this trainer (Apex is missing, one of core's classes is
deprecated).  This module silences these warnings before any module of core is imported.
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
)  # core imports it; on a CPU it warns that there is no CUDA
