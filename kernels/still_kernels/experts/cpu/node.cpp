// still::Experts: experts with plain matrices.
#include "node.h"

namespace still_cpu
{

Entry experts_entry()
{
    return entry_of<experts::Node>("Experts");
}

} // namespace still_cpu
