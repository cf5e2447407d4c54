#include "backend/route.h"

namespace pg_sdma {

std::string static_refusal(const CallFacts& facts, const Policy& policy) {
  if (!policy.refusal.empty()) return policy.refusal;
  if (!facts.unsupported.empty()) return facts.unsupported;
  if (facts.sums && !policy.no_sums.empty()) return policy.no_sums;
  if (facts.capturing) return "graph capture";
  if (facts.coalescing) return "inside a coalescing block";
  if (!facts.even) return "uneven shards";
  if (facts.output_bytes < (facts.sums ? policy.min_sum_bytes : policy.min_bytes))
    return "below PG_SDMA_MIN_BYTES";
  if (facts.tensors > 1 && facts.output_bytes / facts.tensors < policy.min_mean_bytes) {
    return "many small tensors";
  }
  return "";
}

}  // namespace pg_sdma
