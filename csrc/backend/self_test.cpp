#include "backend/self_test.h"

#include <ATen/ATen.h>

#include <vector>

namespace pg_sdma {
namespace {

constexpr int64_t kOffset = 3;  // shards start at odd addresses

at::Tensor shard_of(int rank, int64_t bytes) {
  return (at::arange(bytes, at::kLong) * (2 * rank + 3) + rank * 7).remainder(251).to(at::kByte);
}

}  // namespace

std::string self_test(Transport& transport, c10::DeviceType device, int rank, int world,
                      std::chrono::milliseconds timeout) {
  for (const int64_t bytes : {int64_t{1}, int64_t{4099}, int64_t{1} << 20}) {
    const auto options = at::TensorOptions().dtype(at::kByte).device(device);
    at::Tensor input = at::empty({bytes + kOffset}, options).narrow(0, kOffset, bytes);
    input.copy_(shard_of(rank, bytes));
    const at::Tensor output = at::full({bytes * world + kOffset}, 255, options);

    Call call;
    call.operation = "self-test";
    call.dtype = "Byte";
    call.timeout = timeout;
    Piece piece;
    piece.input = input.const_data_ptr();
    piece.bytes = static_cast<size_t>(bytes);
    auto* base = static_cast<char*>(output.mutable_data_ptr()) + kOffset;
    for (int r = 0; r < world; ++r) piece.outputs.push_back(base + r * bytes);
    call.pieces.push_back(std::move(piece));

    transport.queue().follow_caller();
    if (const Decision decision = transport.agree(call); !decision.direct) return decision.reason;
    transport.carry(call);
    transport.queue().caller_follows();

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
