// SPDX-License-Identifier: Apache-2.0
#include "peering.h"
#include "staged/heap.h"
#include "staged/pool_memory.h"
#include "support/log.h"
#include <set>
#include <thread>
#include <utility>

namespace kvbm_cxl {

namespace {

/// How old the knowledge of a peer may be.
constexpr uint64_t peer_age_ns = 2'000'000;

/// Clears a map of those that are gone, once it is twice as long as after the last time.
template <class Map> void clear_of_gone(Map& map, size_t& live) {
    if (map.size() < 2 * live + 64)
        return;
    std::erase_if(map, [](const auto& entry) { return entry.second.expired(); });
    live = map.size();
}

/// Each once: there may be several links to one.
std::string names(const std::vector<std::string>& agents) {
    std::string listed;
    for (const std::string& agent : std::set<std::string>(agents.begin(), agents.end()))
        listed += (listed.empty() ? "" : ", ") + agent;
    return listed;
}

} // namespace

/// A part over a link, posted or not. It ends when a thread looks: that of the application that polls, or one that gives its memory back.
class StagedRun {
    const std::shared_ptr<Core> core_;
    const std::shared_ptr<const Plan> plan_;
    Uses uses_;
    std::mutex mutex_;
    std::shared_ptr<Transfer> transfer_; // under way
    std::shared_ptr<Completion> whom_;

    void not_begun() noexcept {
        transfer_.reset();
        uses_.end();
    }

  public:
    StagedRun(std::shared_ptr<Core> core, std::shared_ptr<const Plan> plan, Uses uses)
        : core_(std::move(core)), plan_(std::move(plan)), uses_(std::move(uses)) {}

    const Plan& plan() const { return *plan_; }

    Status start(Staged& staged, Direction direction, const std::shared_ptr<Completion>& whom) {
        if (!uses_.begin())
            return {NIXL_ERR_NOT_FOUND, "CXL: a transfer was posted whose memory is deregistered: prepare it again"};
        std::lock_guard lock(mutex_);
        Status begun;
        try {
            begun = staged.start(plan_, direction, transfer_);
        } catch (...) {
            not_begun();
            throw;
        }
        if (begun.ok())
            whom_ = whom;
        else
            not_begun();
        return begun;
    }

    std::shared_ptr<Transfer> transfer() {
        std::lock_guard lock(mutex_);
        return transfer_;
    }

    /// Tells of the end if it has come.
    void settle() noexcept {
        std::shared_ptr<Transfer> transfer;
        std::shared_ptr<Completion> whom;
        {
            std::lock_guard lock(mutex_);
            if (!transfer_ || transfer_->status() == NIXL_IN_PROG)
                return;
            transfer = std::exchange(transfer_, nullptr);
            whom = std::exchange(whom_, nullptr);
        }
        nixl_status_t status = transfer->status();
        try {
            if (status != NIXL_SUCCESS && status != NIXL_ERR_CANCELED)
                report(text("staged:", plan_->engine_id, ":", status), {status, transfer->reason()});
        } catch (const std::exception&) {
            // No memory for the reason. The failure is reported without it.
        }
        uses_.end();
        whom->done(status);
    }
};

class StagedPart : public Part {
    const std::shared_ptr<Peering> peering_;
    const Direction direction_;
    const std::shared_ptr<StagedRun> run_;

  public:
    StagedPart(std::shared_ptr<Peering> peering, Direction direction, std::shared_ptr<StagedRun> run)
        : peering_(std::move(peering)), direction_(direction), run_(std::move(run)) {}
    ~StagedPart() override { cancel(); }

    nixl_status_t post(const std::shared_ptr<Completion>& whom) noexcept override {
        try {
            peering_->watch(run_);
            Status begun = run_->start(*peering_->staged_, direction_, whom);
            return begun.ok() ? NIXL_IN_PROG : report("staged", begun);
        } catch (const std::exception& error) {
            return report("staged-start", {NIXL_ERR_BACKEND, text("CXL: beginning a transfer over a link: ", error.what())});
        }
    }

    void poll() noexcept override {
        peering_->progress();
        run_->settle();
    }

    void cancel() noexcept override {
        if (auto transfer = run_->transfer()) {
            peering_->staged_->cancel(*transfer);
            run_->settle();
        }
    }

    uint64_t estimate_us() const noexcept override {
        // Two copies and a round trip.
        return 20 + run_->plan().len_bytes / 5'000 + run_->plan().ranges.size() * 120 / 1000;
    }
};

Peering::Peering(std::shared_ptr<Core> core, std::shared_ptr<cuda::Gpus> gpus) : core_(std::move(core)), gpus_(std::move(gpus)) {}

Status Peering::create(std::shared_ptr<Core> core, std::shared_ptr<cuda::Gpus> gpus, std::shared_ptr<Peering>& peering) {
    const Options& options = core->options;
    std::shared_ptr<Peering> made(new Peering(core, std::move(gpus)));
    LinksOptions how;
    how.spin_us = options.spin_us;
    how.connect_timeout_ms = options.timeout_ms;
    how.thread = how.doorbell = core->has_thread;
    if (Status begun = Links::create(core->pool, {core->agent, hex16(core->id)}, how, made->links_); !begun.ok())
        return begun;
    StagedOptions staging;
    staging.staging_bytes = options.staging_bytes;
    staging.block_bytes = options.staging_chunk_bytes;
    staging.timeout_ms = options.timeout_ms;
    // These functions end with the links, which this object has.
    made->staged_ =
        std::make_unique<Staged>(*made->links_, [self = made.get()](uint64_t number) { return self->find_memory(number); }, staging);
    LinkHooks hooks;
    hooks.may_lend = [registry = &core->registry](uint64_t number) {
        auto registration = registry->find(number);
        return registration && registration->kind == RegionKind::pool && !registration->is_closed();
    };
    hooks.is_used = [self = made.get()](const std::string& engine_id) { return self->is_used(engine_id); };
    hooks.revoke = [self = made.get()](const std::string& engine_id, uint64_t number) { return self->give_back(engine_id, number); };
    hooks.tick = [self = made.get()] { self->report_.tell(self->core_->pool->handle(), self->count_all(true)); };
    made->links_->set_hooks(std::move(hooks));
    peering = std::move(made);
    return {};
}

Peering::~Peering() {
    // Before anything goes that the links call.
    if (links_)
        links_->shut_down();
}

void Peering::shut_down() {
    staged_->shut_down();
    // Applications no longer poll them. Until their end is reported they hold the memory and, through the transfer, themselves.
    settle_all();
}

Counters::Values Peering::count_all(bool is_running) const {
    Counters::Values values = core_->counters.all();
    auto set = [&values](cxl_shm_counter counter, uint64_t value) { values[Counters::place(counter)] = value; };
    const StagedCounts& staged = staged_->counts();
    set(CXL_SHM_COUNT_NIXL_STAGED_READ_BYTES, staged.bytes_read);
    set(CXL_SHM_COUNT_NIXL_STAGED_WRITTEN_BYTES, staged.bytes_written);
    set(CXL_SHM_COUNT_NIXL_SERVED_READ_BYTES, staged.served_read_bytes);
    set(CXL_SHM_COUNT_NIXL_SERVED_WRITTEN_BYTES, staged.served_written_bytes);
    set(CXL_SHM_COUNT_NIXL_REFUSED, staged.refused);
    const Links::Counts& links = links_->counts();
    uint64_t made = links.connected + links.accepted;
    set(CXL_SHM_COUNT_NIXL_NOTIFS_RESENT, links.notes_resent);
    set(CXL_SHM_COUNT_NIXL_LINKS_MADE, made);
    set(CXL_SHM_COUNT_NIXL_LINKS_LOST, links.lost);
    set(CXL_SHM_COUNT_NIXL_PEERS_GONE, links.peers_gone);
    if (is_running) {
        set(CXL_SHM_COUNT_NIXL_ENGINES, 1);
        set(CXL_SHM_COUNT_NIXL_LINKS, made - links.gone);
        set(CXL_SHM_COUNT_NIXL_STAGING_USED_BYTES, staged_->staging_used() * staged_->staging_block_bytes());
        set(CXL_SHM_COUNT_NIXL_STAGING_BYTES, staged_->staging_held() * staged_->staging_block_bytes());
    }
    return values;
}

void Peering::tell_last_counts() {
    links_->within_turn([this] { report_.tell(core_->pool->handle(), count_all(false)); });
}

Status Peering::add(const Peer& peer) {
    return peer.is_local || !peer.is_same_pool ? Status() : links_->add_peer(peer.agent, hex16(peer.info.engine), peer.info.process);
}

void Peering::remove(const Peer& peer) {
    if (peer.is_local || !peer.is_same_pool)
        return;
    std::string engine_id = hex16(peer.info.engine);
    {
        // Transfers prepared on its memory no longer begin. Those under way end before the link does.
        std::lock_guard lock(lent_mutex_);
        for (auto lent = lent_.lower_bound({engine_id, 0}); lent != lent_.end() && lent->first.first == engine_id; ++lent) {
            if (auto held = lent->second.lock())
                held->close();
        }
    }
    if (links_->engine_of(peer.agent) == engine_id)
        (void)links_->remove_peer(peer.agent);
}

void Peering::reach(const Peer& peer) {
    if (!peer.is_local && peer.is_same_pool)
        (void)links_->connect(peer.agent);
}

bool Peering::has_ended(Peer& peer) noexcept {
    peer.looked_up_ns.store(0, std::memory_order_relaxed);
    return is_gone(peer);
}

bool Peering::is_gone(Peer& peer) noexcept {
    if (peer.is_local) {
        auto core = peer.local.lock();
        return !core || core->has_ended.load(std::memory_order_acquire);
    }
    if (!peer.is_same_pool)
        return false;
    uint64_t now = now_ns();
    if (now - peer.looked_up_ns.load(std::memory_order_relaxed) > peer_age_ns) {
        peer.looked_up_ns.store(now, std::memory_order_relaxed);
        try {
            PeerState state = links_->state_of(hex16(peer.info.engine));
            // Unknown to the links: it was disconnected from, or another engine has its agent's name.
            peer.is_gone.store(state == PeerState::gone || state == PeerState::unknown, std::memory_order_release);
        } catch (...) {
            // Looked up again next time.
        }
    }
    return peer.is_gone.load(std::memory_order_acquire);
}

Status Peering::deliver(const Peer& peer, std::string message, const Extents& written) {
    if (peer.is_local) {
        auto core = peer.local.lock();
        if (!core || core->has_ended.load(std::memory_order_acquire))
            return {NIXL_ERR_REMOTE_DISCONNECT, text("CXL: agent ", peer.agent, " of this process has ended")};
        core->inbox.put(core_->agent, std::move(message));
        core->counters.add(CXL_SHM_COUNT_NIXL_NOTIFS_RECEIVED);
    } else if (!peer.is_same_pool) {
        return {NIXL_ERR_MISMATCH, text("CXL: agent ", peer.agent, " uses the pool ", uuid_text(peer.info.pool), ", this one ",
                                        uuid_text(core_->pool->uuid()), ": give both the same")};
    } else if (Status sent = links_->notify_engine(hex16(peer.info.engine), peer.agent, wrap_note(written, message)); !sent.ok()) {
        return sent;
    }
    core_->counters.add(CXL_SHM_COUNT_NIXL_NOTIFS_SENT);
    return {};
}

Status Peering::receive(Notification& note, notif_list_t& notifs) {
    Extents written;
    std::string message;
    if (!unwrap_note(note.text, written, message))
        return {NIXL_ERR_MISMATCH,
                text("CXL: agent ", note.agent, " sent a notification that this plugin does not know: use one version everywhere")};
    uint64_t left_bytes = core_->pool->info().len_bytes;
    for (auto [offset, len] : written) {
        if (len > left_bytes)
            return {NIXL_ERR_MISMATCH, text("CXL: a notification of agent ", note.agent, " names more than the pool has")};
        left_bytes -= len;
        std::byte* address = nullptr;
        if (Status found = core_->pool->range(offset, len, address); !found.ok())
            return found.within(text("CXL: a notification of agent ", note.agent));
        // What this host had cached of it, its own mappings included, is older than what the transfer wrote.
        if (int status = cxl_shm_invalidate(address, len); status != CXL_SHM_OK)
            return pool_failure(status, text("making visible what agent ", note.agent, " wrote"));
    }
    core_->counters.add(CXL_SHM_COUNT_NIXL_NOTIFS_RECEIVED);
    notifs.emplace_back(std::move(note.agent), std::move(message));
    return {};
}

void Peering::take(notif_list_t& notifs) {
    core_->inbox.take(notifs);
    links_->progress();
    for (Notification& note : links_->take_notifications()) {
        if (Status taken = receive(note, notifs); !taken.ok())
            report("note", taken);
    }
}

void Peering::progress() noexcept {
    try {
        links_->progress();
    } catch (const std::exception& error) {
        log_failure("progress", "CXL: progress of the links: ", error);
    }
}

void Peering::lend(const RemoteRegion& region) {
    std::lock_guard lock(lent_mutex_);
    clear_of_gone(lent_, live_lent_);
    std::string engine_id = hex16(region.is.engine);
    region.own->loan = std::make_unique<Loan>(links_->access_to(engine_id), region.is.registration);
    lent_.emplace(std::make_pair(std::move(engine_id), region.is.registration), region.own);
}

void Peering::borrow(const Peer& peer, const std::vector<std::shared_ptr<Loan>>& loans, std::function<void(const Status&)> done) {
    links_->borrow(hex16(peer.info.engine), loans, core_->options.timeout_ms, std::move(done));
}

bool Peering::give_back(const std::string& engine_id, uint64_t registration) {
    std::lock_guard lock(lent_mutex_);
    bool is_free = true;
    auto [first, last] = lent_.equal_range({engine_id, registration});
    for (auto lent = first; lent != last; ++lent) {
        if (auto held = lent->second.lock()) {
            held->loan->take_back();
            is_free = is_free && !held->is_used();
        }
    }
    return is_free;
}

bool Peering::is_used(const std::string& engine_id) {
    std::lock_guard lock(lent_mutex_);
    for (auto lent = lent_.lower_bound({engine_id, 0}); lent != lent_.end() && lent->first.first == engine_id; ++lent) {
        if (auto held = lent->second.lock(); held && held->is_used())
            return true;
    }
    return false;
}

void Peering::watch(const std::shared_ptr<StagedRun>& run) {
    std::lock_guard lock(runs_mutex_);
    clear_of_gone(runs_, live_runs_);
    runs_.emplace(run.get(), run);
}

void Peering::settle_all() {
    std::vector<std::shared_ptr<StagedRun>> runs;
    {
        std::lock_guard lock(runs_mutex_);
        for (const auto& [address, run] : runs_) {
            if (auto held = run.lock())
                runs.push_back(std::move(held));
        }
    }
    for (const auto& run : runs)
        run->settle();
}

std::shared_ptr<Memory> Peering::find_memory(uint64_t number) {
    auto registration = core_->registry.find(number);
    if (!registration || !registration->begin_use())
        return nullptr;
    std::shared_ptr<void> use(registration.get(), [registration](void*) { registration->end_use(); });
    Status failure;
    auto memory = memory_of(*registration, failure);
    if (!memory)
        return nullptr;
    auto used = std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<Memory>>>(std::move(use), memory);
    return {used, memory.get()};
}

std::shared_ptr<Memory> Peering::memory_of(Registration& registration, Status& failure) {
    Piece whole{registration.base, registration.len_bytes};
    switch (registration.kind) {
    case RegionKind::heap:
        return std::make_shared<HeapMemory>(core_->pool, whole);
    case RegionKind::pool:
        return std::make_shared<PoolMemory>(core_->pool, whole, registration.pool_offset);
    case RegionKind::device: {
        auto* range = dynamic_cast<cuda::DeviceRange*>(registration.extra.get());
        if (range && gpus_)
            return std::make_shared<cuda::DeviceMemory>(gpus_, range->device, registration.shared_from_this(), core_->options.timeout_ms);
        failure = {NIXL_ERR_NOT_SUPPORTED, "CXL: there is no GPU"};
        return nullptr;
    }
    default:
        failure = {NIXL_ERR_NOT_SUPPORTED, "CXL: objects and files are not reached over links"};
        return nullptr;
    }
}

Status Peering::make_staged_part(nixl_xfer_op_t operation, const Peer& peer, const Pairs& pairs, std::unique_ptr<Part>& part) {
    std::vector<std::shared_ptr<Memory>> memories;
    std::map<const Registration*, uint32_t> known;
    std::vector<Range> ranges;
    ranges.reserve(pairs.size());
    Uses uses;
    for (const Pair& pair : pairs) {
        auto [place, is_new] = known.emplace(pair.local, static_cast<uint32_t>(memories.size()));
        if (is_new) {
            Status failure;
            auto memory = memory_of(*pair.local, failure);
            if (!memory)
                return failure.ok() ? Status(NIXL_ERR_NOT_SUPPORTED, "CXL: this memory cannot be staged") : failure;
            memories.push_back(std::move(memory));
            uses.add(pair.local);
        }
        ranges.push_back({pair.local_address, pair.remote_address, pair.len_bytes, pair.remote->is.registration, place->second});
    }
    std::shared_ptr<const Plan> plan;
    if (Status made = Plan::make(hex16(peer.info.engine), std::move(memories), ranges, plan); !made.ok())
        return made;
    auto run = std::make_shared<StagedRun>(core_, std::move(plan), std::move(uses));
    part = std::make_unique<StagedPart>(shared_from_this(), operation == NIXL_READ ? Direction::read : Direction::write, std::move(run));
    return {};
}

Status Peering::release(Registration& registration) {
    registration.close();
    uint64_t timeout_ms = core_->options.timeout_ms;
    std::vector<std::string> silent;
    // Only memory in the pool is ever lent.
    if (registration.kind == RegionKind::pool)
        (void)links_->revoke(registration.id, timeout_ms, silent);
    uint64_t end = now_ns() + timeout_ms * 1'000'000;
    while (registration.is_used() && now_ns() < end) {
        progress();
        settle_all();
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    if (registration.is_used())
        return {NIXL_ERR_NOT_ALLOWED, text("CXL: ", registration.len_bytes, " bytes at ", hex(registration.base),
                                           " are deregistered but still in use by a transfer: do not free them")};
    if (silent.empty())
        return {};
    return {NIXL_ERR_NOT_ALLOWED,
            text("CXL: ", registration.len_bytes, " bytes at ", hex(registration.base), " are deregistered, but no word came from ",
                 names(silent), ", which may still copy there: do not free them before they are deregistered once more")};
}

void Peering::take_back() noexcept {
    try {
        std::vector<std::string> silent;
        if (!links_->revoke_all(core_->options.timeout_ms, silent).ok())
            log(LogLevel::error, text("CXL: an engine ends, but no word came from ", names(silent),
                                      ", which may still copy to and from what it had registered in the pool: do not use that for "
                                      "anything else before these have ended"));
    } catch (const std::exception& error) {
        log(LogLevel::error, "CXL: an engine ends without having taken back what it lent to peers: they may still use it");
        log(LogLevel::error, error.what());
    }
}

} // namespace kvbm_cxl
