// SPDX-License-Identifier: Apache-2.0
//
// Engines of one process that stage transfers for one another, each with its own heap registrations.
#pragma once

#include "staged/heap.h"
#include "staged/staged.h"
#include "world.h"
#include <algorithm>

namespace staged_engines {

using namespace world;

struct Heap {
    std::vector<std::byte> bytes;
    std::shared_ptr<Memory> memory;
    explicit Heap(size_t len_bytes) : bytes(len_bytes) { memory = std::make_shared<HeapMemory>(pool, Piece{address(), len_bytes}); }
    uint64_t address() const { return reinterpret_cast<uint64_t>(bytes.data()); }
};

/// The engines that there are.
inline std::vector<Links*> engines;

/// Has every engine's copies until now behind it, in a way that the thread sanitizer sees: from one engine to the other the order goes
/// through the pool, whose library is not built with it.
inline void see_all() {
    for (Links* links : engines)
        links->within_turn([] {});
}

struct Book {
    std::mutex mutex;
    std::map<uint64_t, std::shared_ptr<Memory>> memories;
    uint64_t next = 1;

    std::shared_ptr<Memory> find(uint64_t registration) {
        std::lock_guard lock(mutex);
        auto found = memories.find(registration);
        return found == memories.end() ? nullptr : found->second;
    }
    uint64_t add(const Heap& heap) {
        std::lock_guard lock(mutex);
        memories.emplace(next, std::make_shared<HeapMemory>(pool, Piece{heap.address(), heap.bytes.size()}));
        return next++;
    }
    /// Waits until no session holds it.
    void remove(uint64_t registration) {
        std::weak_ptr<Memory> gone;
        {
            std::lock_guard lock(mutex);
            gone = memories.at(registration);
            memories.erase(registration);
        }
        CHECK(wait_until([&] { return gone.expired(); }, [] { nap(); }));
        see_all();
    }
};

/// Memory of the pool, as an application registers it.
struct PoolMemory : Memory {
    PoolBlock block;
    explicit PoolMemory(size_t len_bytes) { CHECK_OK(PoolBlock::allocate(pool, len_bytes, block)); }
    uint64_t address() const { return reinterpret_cast<uint64_t>(block.address()); }
    bool contains(const Piece& piece) const override { return lies_in(piece, {address(), block.len_bytes()}); }
    Status to_pool(std::span<const Piece> pieces, uint64_t offset) override {
        for (const Piece& piece : pieces)
            CHECK(cxl_shm_invalidate(reinterpret_cast<void*>(piece.address), piece.len_bytes) == CXL_SHM_OK);
        return heap_to_pool(*pool, pieces, offset);
    }
    Status from_pool(std::span<const Piece> pieces, uint64_t offset) override {
        if (Status status = pool_to_heap(*pool, pieces, offset); !status.ok())
            return status;
        for (const Piece& piece : pieces)
            CHECK(cxl_shm_flush(reinterpret_cast<void*>(piece.address), piece.len_bytes) == CXL_SHM_OK);
        return {};
    }
    std::optional<uint64_t> pool_offset(const Piece& piece) const override { return block.offset() + (piece.address - address()); }
    Status publish(const Piece& piece) override {
        CHECK(cxl_shm_flush(reinterpret_cast<void*>(piece.address), piece.len_bytes) == CXL_SHM_OK);
        return {};
    }
};

struct Engine {
    Identity self;
    Book book;
    std::unique_ptr<Links> links;
    std::unique_ptr<Staged> staged;

    explicit Engine(const std::string& agent, StagedOptions options = {}, LinksOptions links_options = {})
        : self{agent, random_engine_id()} {
        CHECK_OK(Links::create(pool, self, links_options, links));
        staged = std::make_unique<Staged>(*links, [this](uint64_t registration) { return book.find(registration); }, options);
        engines.push_back(links.get());
    }
    ~Engine() {
        std::erase(engines, links.get());
        staged.reset();
        links.reset();
    }
    void knows(const Engine& other) { CHECK_OK(links->add_peer(other.self.agent, other.self.engine_id)); }

    std::shared_ptr<Transfer> start(const Engine& peer, Direction direction, std::vector<std::shared_ptr<Memory>> memories,
                                    const std::vector<Range>& ranges) {
        std::shared_ptr<const Plan> plan;
        CHECK_OK(Plan::make(peer.self.engine_id, std::move(memories), ranges, plan));
        see_all();
        std::shared_ptr<Transfer> transfer;
        (void)staged->start(plan, direction, transfer);
        return transfer;
    }
    nixl_status_t await(Transfer& transfer) {
        CHECK(wait_until([&] { return transfer.status() != NIXL_IN_PROG; }, [&] { links->progress(); }));
        see_all();
        return transfer.status();
    }
    void await_ok(Transfer& transfer) {
        if (await(transfer) != NIXL_SUCCESS)
            std::fprintf(stderr, "%s: %d %s\n", self.agent.c_str(), transfer.status(), transfer.reason().c_str());
        CHECK(transfer.status() == NIXL_SUCCESS);
    }
    void await_unused() {
        bool ok = wait_until([&] { return staged->staging_used() == 0; }, [&] { links->progress(); });
        CHECK(ok);
    }
};

struct Pair {
    Engine a, b;
    explicit Pair(StagedOptions options = {}, LinksOptions links_options = {})
        : a("a", options, links_options), b("b", options, links_options) {
        a.knows(b);
        b.knows(a);
    }
};

} // namespace staged_engines
