from typing import Any

import numpy as np
import numpy.typing as npt

def export(array: npt.NDArray[Any], **options: Any) -> Any: ...

class ExportedArray(np.ndarray[Any, np.dtype[Any]]): ...
