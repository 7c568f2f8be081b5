// still::Attention: softmax attention over all keys.
#include "node.h"

namespace still_cpu
{

Entry attention_entry()
{
    return entry_of<softmax::Node>("Attention");
}

} // namespace still_cpu
