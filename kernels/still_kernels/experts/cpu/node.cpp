// still::Experts: experts whose matrices are numbers.
#include "node.h"

namespace still_cpu
{

Entry experts_entry()
{
    return entry_of<experts::Node>("Experts");
}

} // namespace still_cpu
