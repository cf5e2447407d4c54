#include "backend/self_test.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

#include "engine/inject.h"

namespace pg_sdma {
namespace {

using Milliseconds = std::chrono::milliseconds;

constexpr int64_t kOffset = 3;  // shards start at odd addresses

at::Tensor shard_of(int rank, int64_t bytes) {
  return (at::arange(bytes, at::kLong) * (2 * rank + 3) + rank * 7).remainder(251).to(at::kByte);
}

}  // namespace

std::string self_test(Transport& transport, c10::DeviceType device, int rank, int world,
                      std::chrono::steady_clock::time_point deadline) {
  for (const int64_t bytes : {int64_t{1}, int64_t{4099}, int64_t{1} << 20}) {
    const auto options = at::TensorOptions().dtype(at::kByte).device(device);
    at::Tensor input = at::empty({bytes + kOffset}, options).narrow(0, kOffset, bytes);
    input.copy_(shard_of(rank, bytes));
    const at::Tensor output = at::full({bytes * world + kOffset}, 255, options);

    Call call;
    call.operation = "self-test";
    call.dtype = "Byte";
    const auto left = deadline - std::chrono::steady_clock::now();
    call.timeout = std::max(std::chrono::duration_cast<Milliseconds>(left), Milliseconds(1));
    Piece piece;
    piece.input = input.const_data_ptr();
    piece.bytes = static_cast<size_t>(bytes);
    auto* base = static_cast<char*>(output.mutable_data_ptr()) + kOffset;
    for (int r = 0; r < world; ++r) piece.outputs.push_back(base + r * bytes);
    call.pieces.push_back(std::move(piece));

    transport.queue().follow_caller();
    if (const Decision decision = transport.agree(call); !decision.direct) return decision.here;
    transport.carry(call);
    transport.queue().caller_follows();

    if (inject::corrupts("self-test")) output.narrow(0, kOffset, 1).bitwise_xor_(1);
    const at::Tensor got = output.cpu();
    for (int r = 0; r < world; ++r) {
      if (!got.narrow(0, kOffset + r * bytes, bytes).equal(shard_of(r, bytes))) {
        return "the self-test read wrong bytes from rank " + std::to_string(r) + " at shards of " +
               std::to_string(bytes) + " bytes";
      }
    }
    if (!got.narrow(0, 0, kOffset).eq(255).all().item<bool>()) {
      return "the self-test wrote in front of its output";
    }
  }
  return "";
}

}  // namespace pg_sdma
