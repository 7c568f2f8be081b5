"""RAT: a scan inside chunks, softmax attention to their ends; over still::LinearAttention and still::StridedAttention."""
