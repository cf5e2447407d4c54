// What a process exports, and what another one imports.
#include <cstring>

#include "checks.h"

using namespace pg_sdma;
using namespace standin_test;

namespace {

constexpr size_t kChunk = size_t{1} << 16;

CHECK(allocations_are_exported_once) {
  const auto engine = engine_on(0);
  const Buffer buffer(4096);
  const Place whole = engine->publish(buffer.data(), 4096);
  const Place part = engine->publish(buffer.data() + 1000, 96);
  REQUIRE(whole.export_id == 1 && whole.offset == 0);
  REQUIRE(part.export_id == 1 && part.offset == 1000);
  REQUIRE(standin_calls("cuIpcGetMemHandle") == 1);
  REQUIRE(engine->ticket(1).bytes == 4096 && engine->ticket(1).descriptors == 0);
}

CHECK(freed_memory_is_another_export) {
  const auto engine = engine_on(0);
  auto buffer = std::make_unique<Buffer>(4096);
  const Address before = buffer->base();
  const uint64_t first = engine->publish(buffer->data(), 1).export_id;
  REQUIRE(engine->live(first));
  buffer.reset();
  REQUIRE(!engine->live(first));
  REQUIRE(has(refusal([&] { engine->ticket(first); }), "freed"));
  buffer = std::make_unique<Buffer>(4096);
  REQUIRE(buffer->base() == before);
  REQUIRE(engine->publish(buffer->data(), 1).export_id != first);
}

CHECK(memory_that_cannot_be_exported_says_why) {
  const auto engine = engine_on(0);
  const auto why = [&](const void* data, size_t bytes) {
    return refusal([&] { engine->publish(data, bytes); });
  };
  const Buffer buffer(4096);
  REQUIRE(has(why(buffer.data() + 4000, 97), "past its allocation"));
  char on_the_stack[64];
  REQUIRE(has(why(on_the_stack, 64), "not the device's"));
  Address managed = 0;
  REQUIRE(cuMemAllocManaged(&managed, 4096, 1) == 0);
  REQUIRE(has(why(reinterpret_cast<void*>(managed), 8), "managed"));
  const auto other = engine_on(1);
  const Buffer elsewhere(4096);
  REQUIRE(has(why(elsewhere.data(), 8), "memory of device 1 on device 0"));
}

CHECK(chunks_are_exported_as_far_as_tensors_touch_them) {
  const auto engine = engine_on(0);
  const Buffer segment(5 * kChunk, kChunk, 0);
  const Place place = engine->publish(segment.data() + kChunk + 10, 2 * kChunk);
  const Ticket ticket = engine->ticket(place.export_id);
  REQUIRE(place.offset == 10 && ticket.descriptors == 3 && ticket.bytes == 3 * kChunk);
  const Place inside = engine->publish(segment.data() + 3 * kChunk, 5);
  REQUIRE(inside.export_id == place.export_id && inside.offset == 2 * kChunk);
  REQUIRE(engine->publish(segment.data(), 5).export_id != place.export_id);
}

CHECK(a_replaced_chunk_is_another_export) {
  const auto engine = engine_on(0);
  Buffer segment(3 * kChunk, kChunk, 0);
  const uint64_t before = engine->publish(segment.data(), 3 * kChunk).export_id;
  segment.unmap_chunk(1);
  segment.map_chunk(1, 0);
  REQUIRE(engine->publish(segment.data(), 5).export_id == before);  // it touches only chunk 0
  REQUIRE(!engine->live(before));
  REQUIRE(engine->publish(segment.data(), 3 * kChunk).export_id != before);
}

// -- two processes: rank 0 owns, rank 1 imports

struct Told {
  char identity[128];
  Ticket ticket;
};

int to_owner[2];
int to_importer[2];

void tell_owner() { REQUIRE(write(to_owner[1], "", 1) == 1); }
void hear_owner() {
  char byte = 0;
  REQUIRE(read(to_importer[0], &byte, 1) == 1);
}

// Rank 0 tells what it has published and waits; rank 1 acts on it. Rank 0 does what `when_told`
// says once it is told to.
void owner_and_importer(
    const std::function<Place(Engine&)>& publish,
    const std::function<void(Engine&, const Told&)>& act,
    const std::function<void()>& before_acting = [] {},
    const std::function<void(Engine&)>& when_told = nullptr) {
  REQUIRE(pipe(to_owner) == 0 && pipe(to_importer) == 0);
  int told[2];
  int done[2];
  REQUIRE(pipe(told) == 0 && pipe(done) == 0);
  const auto rank_body = [&](int rank) {
    Told message{};
    char byte = 0;
    if (rank == 0) {
      close(done[1]);
      const auto engine = engine_on(0);
      const Place place = publish(*engine);
      message.ticket = engine->ticket(place.export_id);
      engine->identity().copy(message.identity, sizeof message.identity - 1);
      before_acting();
      REQUIRE(write(told[1], &message, sizeof message) == sizeof message);
      if (when_told) {
        REQUIRE(read(to_owner[0], &byte, 1) == 1);
        when_told(*engine);
        REQUIRE(write(to_importer[1], "", 1) == 1);
      }
      REQUIRE(read(done[0], &byte, 1) == 0);  // rank 1 has ended
      REQUIRE(standin_handles() == 0);
    } else {
      if (const char* fail = std::getenv("IMPORTER_FAIL")) setenv("STANDIN_FAIL", fail, 1);
      REQUIRE(read(told[0], &message, sizeof message) == sizeof message);
      act(*engine_on(1), message);
      // A handle would keep the memory allocated, mapped or not.
      REQUIRE(standin_mapped() == 0 && standin_handles() == 0);
    }
  };
  REQUIRE(run_ranks(2, rank_body, [&] { close(done[1]); }) == 0);
}

std::unique_ptr<Buffer> owned;  // of rank 0

Place publish_allocation(Engine& engine) {
  owned = std::make_unique<Buffer>(4096);
  std::memset(owned->data(), 7, 4096);
  return engine.publish(owned->data(), 4096);
}

Place publish_chunks(Engine& engine, size_t count) {
  owned = std::make_unique<Buffer>(count * kChunk, kChunk, 0);
  for (size_t i = 0; i < count; ++i) owned->data()[i * kChunk] = static_cast<unsigned char>(i);
  return engine.publish(owned->data(), count * kChunk);
}

CHECK(groups_share_one_mapping) {
  owner_and_importer(publish_allocation, [](Engine& engine, const Told& told) {
    const Mapping first = engine.open(told.identity, told.ticket);
    const Mapping second = engine.open(told.identity, told.ticket);
    REQUIRE(first.base == second.base && first.bytes == 4096);
    REQUIRE(standin_calls("cuIpcOpenMemHandle_v2") == 1);
    engine.close(first);
    REQUIRE(*reinterpret_cast<unsigned char*>(second.base) == 7);
    engine.close(second);
  });
}

CHECK(many_chunks_arrive_in_order) {
  owner_and_importer([](Engine& engine) { return publish_chunks(engine, 200); },
                     [](Engine& engine, const Told& told) {
                       const Mapping mapping = engine.open(told.identity, told.ticket);
                       for (size_t i = 0; i < 200; ++i) {
                         const auto* chunk = reinterpret_cast<unsigned char*>(mapping.base);
                         REQUIRE(chunk[i * kChunk] == static_cast<unsigned char>(i));
                       }
                       engine.close(mapping);
                     });
}

CHECK(chunks_freed_before_they_are_opened_are_left_out) {
  owner_and_importer([](Engine& engine) { return publish_chunks(engine, 3); },
                     [](Engine& engine, const Told& told) {
                       const Mapping mapping = engine.open(told.identity, told.ticket);
                       REQUIRE(mapping.bytes == 3 * kChunk && standin_mapped() == 2 * kChunk);
                       const auto* chunk = reinterpret_cast<unsigned char*>(mapping.base);
                       REQUIRE(chunk[0] == 0 && chunk[2 * kChunk] == 2);
                       engine.close(mapping);
                     },
                     [] {
                       owned->unmap_chunk(1);
                       owned->map_chunk(1, 0);
                     });
}

CHECK(chunks_that_are_all_freed_are_refused) {
  owner_and_importer([](Engine& engine) { return publish_chunks(engine, 1); },
                     [](Engine& engine, const Told& told) {
                       const std::string why =
                           refusal([&] { engine.open(told.identity, told.ticket); });
                       REQUIRE(has(why, "freed"));
                     },
                     [] {
                       owned->unmap_chunk(0);
                       owned->map_chunk(0, 0);
                     });
}

// Tensors wander through a segment; the last of their chunks is replaced meanwhile.
CHECK(a_chunk_is_mapped_once_whatever_the_exports) {
  constexpr size_t kRuns = 8;
  owner_and_importer(
      [](Engine& engine) {
        const Place first = publish_chunks(engine, 2);
        REQUIRE(first.export_id == 1);
        owned = std::make_unique<Buffer>(kRuns * kChunk, kChunk, 0);
        for (size_t i = 0; i < kRuns; ++i) owned->data()[i * kChunk] = i;
        for (size_t i = 0; i + 1 < kRuns; ++i) {
          const Place place = engine.publish(owned->data() + i * kChunk + 5, kChunk);
          REQUIRE(place.export_id == i + 2 && place.offset == 5);
          engine.ticket(place.export_id);
        }
        return engine.publish(owned->data(), kRuns * kChunk);
      },
      [](Engine& engine, const Told& told) {
        std::vector<Mapping> mappings;
        Ticket ticket = told.ticket;
        for (size_t i = 0; i + 1 < kRuns; ++i) {
          ticket.export_id = i + 2;
          ticket.descriptors = 2;
          ticket.bytes = 2 * kChunk;
          mappings.push_back(engine.open(told.identity, ticket));
        }
        mappings.push_back(engine.open(told.identity, told.ticket));
        REQUIRE(standin_mapped() == kRuns * kChunk);
        REQUIRE(standin_calls("cuMemImportFromShareableHandle") == kRuns);
        const auto* whole = reinterpret_cast<unsigned char*>(mappings.back().base);
        for (size_t i = 0; i < kRuns; ++i) REQUIRE(whole[i * kChunk] == i);
        for (size_t i = 0; i + 1 < kRuns; ++i) {
          REQUIRE(reinterpret_cast<unsigned char*>(mappings[i].base) == whole + i * kChunk);
        }
        engine.close(mappings.back());
        REQUIRE(standin_mapped() == kRuns * kChunk);
        engine.close(mappings.front());
        REQUIRE(standin_mapped() == (kRuns - 1) * kChunk);
        for (size_t i = 1; i + 1 < kRuns; ++i) engine.close(mappings[i]);
      });
}

// What the owner has mapped anew where the importer still has the old chunk.
CHECK(a_chunk_in_anothers_place_is_mapped_elsewhere) {
  owner_and_importer(
      [](Engine& engine) {
        const Place before = publish_chunks(engine, 2);
        engine.ticket(before.export_id);
        return before;
      },
      [](Engine& engine, const Told& told) {
        const Mapping before = engine.open(told.identity, told.ticket);
        tell_owner();
        hear_owner();
        Ticket ticket = told.ticket;
        ticket.export_id = 2;
        const Mapping after = engine.open(told.identity, ticket);
        REQUIRE(reinterpret_cast<unsigned char*>(before.base)[kChunk] == 1);
        REQUIRE(reinterpret_cast<unsigned char*>(after.base)[0] == 0);
        REQUIRE(reinterpret_cast<unsigned char*>(after.base)[kChunk] == 9);
        engine.close(before);
        REQUIRE(reinterpret_cast<unsigned char*>(after.base)[kChunk] == 9);
        engine.close(after);
      },
      [] {},
      [](Engine& engine) {
        owned->unmap_chunk(1);
        owned->map_chunk(1, 0);
        owned->data()[kChunk] = 9;
        REQUIRE(engine.publish(owned->data(), 2 * kChunk).export_id == 2);
        engine.ticket(2);
      });
}

CHECK(the_descriptors_of_another_process_are_refused) {
  owner_and_importer([](Engine& engine) { return publish_chunks(engine, 3); },
                     [](Engine& engine, const Told& told) {
                       std::string identity = told.identity;  // "<uuid> <process> <socket>"
                       const size_t process = identity.find(' ') + 1;
                       identity.replace(process, identity.find(' ', process) - process, "1");
                       const std::string why = refusal([&] { engine.open(identity, told.ticket); });
                       REQUIRE(has(why, "the socket of process 1 is process"));
                     });
}

// With IMPORTER_FAIL, which is the importer's STANDIN_FAIL.
CHECK(an_import_that_fails_leaves_nothing_mapped) {
  owner_and_importer([](Engine& engine) { return publish_chunks(engine, 3); },
                     [](Engine& engine, const Told& told) {
                       const std::string why =
                           refusal([&] { engine.open(told.identity, told.ticket); });
                       REQUIRE(has(why, "cannot be opened on device 1") && has(why, "999"));
                     });
}

}  // namespace
