// still::BlockAttention: softmax attention to chosen blocks.
#include "../../attention/cpu/node.h"

namespace still_cpu
{

Entry block_attention_entry()
{
    return entry_of<softmax::Node>("BlockAttention");
}

} // namespace still_cpu
