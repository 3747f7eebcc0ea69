"""Logical axes, meshes, and the one table from the ones to the others."""

from zoo.sharding.axes import logical_axes as logical_axes
from zoo.sharding.constraints import constrain as constrain
from zoo.sharding.constraints import is_sharding as is_sharding
from zoo.sharding.constraints import mapped as mapped
from zoo.sharding.constraints import num_parts as num_parts
from zoo.sharding.mesh import make_mesh as make_mesh
from zoo.sharding.placement import batch_sharding as batch_sharding
from zoo.sharding.placement import canonical as canonical
from zoo.sharding.placement import like_parameters as like_parameters
from zoo.sharding.placement import mesh_of as mesh_of
from zoo.sharding.placement import num_batch_parts as num_batch_parts
from zoo.sharding.placement import placement_table as placement_table
from zoo.sharding.placement import replicated as replicated
from zoo.sharding.placement import shardings as shardings
from zoo.sharding.rules import MESH_AXES as MESH_AXES
from zoo.sharding.rules import RULES as RULES
from zoo.sharding.rules import SEQUENCE_PARALLEL as SEQUENCE_PARALLEL
from zoo.sharding.rules import STORAGE_AXES as STORAGE_AXES
from zoo.sharding.rules import Rules as Rules
from zoo.sharding.rules import ShardingError as ShardingError
from zoo.sharding.rules import check_rules as check_rules
from zoo.sharding.rules import mesh_axes as mesh_axes
from zoo.sharding.rules import use as use
from zoo.sharding.specs import partition_spec as partition_spec
from zoo.sharding.specs import spec_in_use as spec_in_use
