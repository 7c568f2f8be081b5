// still::ExpertsNBits: experts with low-bit matrices in blocks.
#include "../../experts/cpu/node.h"

namespace still_cpu
{

Entry experts_nbits_entry()
{
    return entry_of<experts::Node>("ExpertsNBits");
}

} // namespace still_cpu
