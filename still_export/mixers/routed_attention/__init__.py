"""NAtS-L: chunks that go to softmax attention or to a gated delta rule; over still::RoutedAttention and still::BlockAttention."""
