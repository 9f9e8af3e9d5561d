"""How operators take layouts: a call and its arguments' layouts in, wanted ones and local code out."""

from piper.bodies.tensor.rules import along_dims as along_dims
from piper.bodies.tensor.rules import attention as attention
from piper.bodies.tensor.rules import expert_rows as expert_rows
from piper.bodies.tensor.rules import losses as losses
from piper.bodies.tensor.rules import pointwise as pointwise
from piper.bodies.tensor.rules import product_rules as product_rules
from piper.bodies.tensor.rules import random as random
from piper.bodies.tensor.rules import reductions as reductions
from piper.bodies.tensor.rules import shapes as shapes
from piper.bodies.tensor.rules import slices as slices
