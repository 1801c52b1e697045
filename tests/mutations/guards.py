"""The guards that a mutation removes: the exact source text, what replaces it, and the test that must notice.

A text occurs exactly once in its file. It is as small as possible, so that only a change of the guard itself moves it.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Guard:
    """One guard. `test`: the node id of a test that fails without it; `database`: its database, sqlite or postgres."""

    name: str
    file: str
    text: str
    replacement: str
    guarantee: str
    test: str
    database: str = "sqlite"

    def find_fault(self, root: Path) -> str | None:
        """Return why the guard cannot be removed from this tree; None: it can."""
        path = root / self.file
        count = path.read_text().count(self.text) if path.is_file() else 0
        if count == 1:
            return None
        return f"{self.name} has moved: its text occurs {count} times in {self.file}. Update tests/mutations/guards.py."

    def mutate(self, source: str) -> str:
        return source.replace(self.text, self.replacement)


_TRANSITIONS = "rotation/services/rotations/transitions.py"
_RUNNER = "rotation/services/campaigns/runner.py"
_STARTING = "rotation/services/schedules/starting.py"
_STATES = "rotation/domain/states.py"
_SILENCE = "rotation/domain/silence.py"
_JUDGEMENT = "keyvault/access/judgement.py"
_DECISION = "keyvault/access/decision.py"
_VERIFICATION = "keyvault/access/verification.py"
_FOUR_EYES = "keyvault/services/approvals/four_eyes.py"
_BREAK_GLASS = "keyvault/services/approvals/break_glass.py"
_LIFECYCLE = "keyvault/services/keys/lifecycle.py"
_TRANSACTION = "keyvault/services/recording/transaction.py"
_RECORDING = "keyvault/models/recording.py"
_RULES = "keyvault/models/triggers/rules.py"
_COPIES = "keyvault/services/secrets/stored_copies.py"
_ENGINE = "keyvault/hotpath/engine/engine.py"
_SECOND_FACTORS = "keyvault/services/sessions/second_factors.py"
_SESSIONS = "keyvault/services/sessions/store.py"
_ID_TOKENS = "keyvault/services/sessions/id_tokens.py"
_SINGLE_SIGN_ON = "keyvault/access/single_sign_on.py"
_OPERATOR_CHANGES = "keyvault/services/operator_changes.py"
_CHECKPOINTS = "keyvault/services/audit/checkpoints.py"
_STARTUP = "keyvault/services/startup/startup_checks.py"
_APPROVING_PERSONS = "keyvault/services/operators/approving_persons.py"

_BREAK_GLASS_TESTS = "tests/services/approvals/test_break_glass.py"
_TOGETHER_TESTS = "tests/admin/oversight/test_approvals.py"
_ENGINE_TESTS = "tests/rotation/services/rotations/test_engine.py"
_TRIPWIRE_TESTS = "tests/rotation/services/rotations/test_tripwire.py"
_RUNNER_TESTS = "tests/rotation/services/campaigns/test_runner.py"
_EVENT_TESTS = "tests/rotation/domain/test_events.py"
_SOURCE_TESTS = "tests/rotation/domain/test_silence_of_sources.py"
_COPY_TESTS = "tests/rotation/services/rotations/test_copies.py"
_STORED_TESTS = "tests/services/secrets/test_stored_copies.py"
_SETTLING_TESTS = f"{_STORED_TESTS}::test_copy_is_not_settled_by_a_worker_that_slept_past_its_lease"
_TRANSITION_TESTS = "tests/rotation/services/rotations/test_transitions.py"
_LIVING_TESTS = f"{_TRANSITION_TESTS}::test_transition_whose_other_key_was_revoked_meanwhile_is_refused"
_FENCING_TESTS = f"{_TRANSITION_TESTS}::test_transition_of_a_worker_that_lost_its_lease_is_refused"
_DELIVERY_TESTS = "tests/rotation/services/rotations/test_delivery.py"
_SILENCE_TESTS = "tests/rotation/services/rotations/test_silence.py"
_RACE_TESTS = "tests/rotation/services/rotations/test_emergency_races.py"
_CAMPAIGN_TESTS = "tests/rotation/services/campaigns/test_campaigns.py"
_COLLECTION_TESTS = "tests/services/issuance/test_collection.py"
_TRANSACTION_TESTS = "tests/services/recording/test_transaction.py"
_USAGE_TESTS = "tests/services/usage/test_recorder.py"
_DECISION_TESTS = "tests/access/test_decision.py"
_VERIFICATION_TESTS = "tests/access/test_verification.py"
_ISSUANCE_TESTS = "tests/services/issuance/test_requests.py"
_SLOW_ISSUANCE_TESTS = f"{_ISSUANCE_TESTS}::test_issuance_by_a_worker_that_slept_past_its_lease_stores_no_discarded_key"
_RECORDING_TESTS = "tests/models/test_recording.py"
_TRIGGER_TESTS = "tests/models/test_triggers.py::test_triggers_attack_on_a_rule_is_refused_by_that_rule"
_JUDGING_TESTS = "tests/services/verification/test_judging.py"
_MEMORY_TESTS = "tests/hotpath/engine/test_engine.py"
_ENFORCEMENT_TESTS = "tests/admin/framework/test_enforcement.py"
_STEP_UP_TESTS = "tests/admin/framework/test_step_up.py"
_SESSION_TESTS = "tests/services/sessions/test_sessions.py"
_FACTOR_TESTS = "tests/services/sessions/test_second_factors.py"
_TOKEN_TESTS = "tests/services/sessions/test_id_tokens.py"
_CLAIM_TESTS = "tests/access/test_single_sign_on.py"
_OPERATOR_TESTS = "tests/services/test_operator_changes.py"
_APPROVING_TESTS = "tests/services/operators/test_approving_persons.py::test_approving_persons_who_can_sign_in_stay_two"
_MARK_TESTS = "tests/services/audit/test_checkpoint_marks.py"
_REPLAY_TESTS = "tests/management/test_replay_revocations.py"

GUARDS = (
    # --- rotations ------------------------------------------------------------------------------------------
    Guard(
        "living-replacement-in-quarantine",
        _TRANSITIONS,
        "facts: Facts, step: Move) -> Changes:\n    _require_living(rotation.replacement, rotation, grant.at)\n",
        "facts: Facts, step: Move) -> Changes:\n",
        "The engine suspends a predecessor only while its replacement is usable.",
        f"{_LIVING_TESTS}[quarantine]",
    ),
    Guard(
        "living-replacement-in-revoking",
        _TRANSITIONS,
        "def _revoke(grant: Grant, rotation: Rotation, facts: Facts) -> Changes:\n"
        "    _require_living(rotation.replacement, rotation, grant.at)\n",
        "def _revoke(grant: Grant, rotation: Rotation, facts: Facts) -> Changes:\n",
        "The engine revokes a predecessor only while its replacement is usable.",
        f"{_LIVING_TESTS}[revoking]",
    ),
    Guard(
        "living-predecessor-in-rollback",
        _TRANSITIONS,
        "def _quarantine_replacement(grant: Grant, rotation: Rotation, facts: Facts) -> Changes:\n"
        "    _require_living(rotation.predecessor, rotation, grant.at)\n",
        "def _quarantine_replacement(grant: Grant, rotation: Rotation, facts: Facts) -> Changes:\n",
        "A rollback suspends a replacement only while the predecessor is usable.",
        f"{_LIVING_TESTS}[rolling back]",
    ),
    Guard(
        "living-predecessor-at-the-end-of-a-rollback",
        _TRANSITIONS,
        "return {}\n    _require_living(rotation.predecessor, rotation, grant.at)\n",
        "return {}\n",
        "A rollback revokes a replacement only while the predecessor is usable.",
        f"{_LIVING_TESTS}[rolled back]",
    ),
    Guard(
        "living-replacement-locked",
        _TRANSITIONS,
        "Key.objects.select_for_update(no_key=True).get(pk=key.pk)",
        "Key.objects.get(pk=key.pk)",
        "The key that stays cannot be revoked between its check and the commit that takes the other one away.",
        f"{_TRANSITION_TESTS}::test_race_of_a_transition_with_a_revocation_of_the_other_key_is_refused",
        "postgres",
    ),
    Guard(
        "expired-key-not-lifted",
        _TRANSITIONS,
        "key.state == KeyState.SUSPENDED and not _is_expired(key, grant.at)",
        "key.state == KeyState.SUSPENDED",
        "A predecessor that expired in quarantine stays suspended, and does not prevent the end of the rotation.",
        f"{_TRANSITION_TESTS}::test_predecessor_that_expires_in_quarantine_is_not_resumed",
    ),
    Guard(
        "request-expires-by-a-true-clock",
        _TRANSITIONS,
        "case S.EXPIRED:\n            require_true_clock()\n",
        "case S.EXPIRED:\n            pass\n",
        "A worker whose clock is wrong closes no request.",
        f"{_TRANSITION_TESTS}::test_worker_with_a_wrong_clock_expires_no_request_and_raises_one_alarm",
        "postgres",
    ),
    Guard(
        "transition-fenced",
        _TRANSITIONS,
        "else:\n            leases.hold(lease)\n    meters.",
        "else:\n            pass\n    meters.",
        "A worker that lost its lease commits no transition.",
        f"{_FENCING_TESTS}[quarantine]",
    ),
    Guard(
        "closing-transition-fenced",
        _TRANSITIONS,
        "if step.to in CLOSED:\n            leases.finish(lease)",
        "if step.to in CLOSED:\n            pass",
        "A worker that lost its lease closes no rotation.",
        f"{_FENCING_TESTS}[rolled back]",
    ),
    Guard(
        "lease-fencing-token",
        "keyvault/services/work/leases.py",
        'update(last_error="") != 1:',
        'update(last_error="") > 1:',
        "A lease that another worker has taken over is no longer held.",
        "tests/services/work/test_leases.py::test_lease_lost_to_another_worker_is_not_held",
    ),
    Guard(
        "deadline-stalls",
        _STATES,
        "facts.plan.at_deadline is AtDeadline.REVOKE and facts.stage is S.OVERLAP",
        "facts.stage is S.OVERLAP",
        "At the deadline a rotation stalls, unless its approved plan says revoke.",
        f"{_EVENT_TESTS}::test_event_in_each_state_does_what_was_reviewed",
    ),
    Guard(
        "silence-of-each-source",
        _STATES,
        "if not awaited and silent_at <= facts.observed_through:",
        "if silent_at <= facts.observed_through:",
        "Each source of the predecessor has moved, is silent or is waived before the quarantine.",
        f"{_SOURCE_TESTS}::test_source_is_finished_when_it_moved_or_was_silent_by_its_habit_or_is_waived",
    ),
    Guard(
        "silence-by-own-habit",
        _SILENCE,
        "max(quiet_seconds, GAPS * self.gap_seconds)",
        "quiet_seconds",
        "A source is silent after twice its own longest gap, so a monthly job is not silent after a week.",
        f"{_SOURCE_TESTS}::test_source_is_finished_when_it_moved_or_was_silent_by_its_habit_or_is_waived",
    ),
    Guard(
        "silence-restarts-after-a-loss",
        _SILENCE,
        "since = since if lost_at is None else max(since, lost_at)",
        "since = since",
        "A verifier that was lost with unreported uses restarts silence.",
        f"{_SOURCE_TESTS}::test_lost_verifier_restarts_the_silence_of_sources_that_have_not_moved",
    ),
    Guard(
        "silence-counts-from-a-resumption",
        _SILENCE,
        "since = self.used_at if resumed_at is None else max(self.used_at, resumed_at)",
        "since = self.used_at",
        "Clients stop while their merchant is suspended, so silence restarts when it is resumed.",
        f"{_SOURCE_TESTS}::test_silence_of_a_suspended_merchant_counts_from_its_resumption",
    ),
    Guard(
        "replacement-carries-the-traffic",
        _STATES,
        "(left_at is not None and max(seen) < left_at)",
        "False",
        "Silence of the predecessor counts only if the replacement was used last, so an outage does not count.",
        f"{_SILENCE_TESTS}::test_silence_counts_only_while_the_replacement_carries_the_traffic",
    ),
    Guard(
        "copy-older-destroyed",
        "rotation/services/rotations/side_effects.py",
        "if version != key.backend_version:\n            # The older",
        "if not version:\n            # The older",
        "A replacement that is written again has one copy, which its row names.",
        f"{_COPY_TESTS}::test_replacement_written_again_by_a_killed_worker_has_one_copy",
    ),
    Guard(
        "copy-settled-before-a-stall",
        "rotation/services/rotations/engine.py",
        "            elif step.to is S.STALLED:\n                effects.settle_delivery(grant, rotation)\n",
        "",
        "The row of a replacement names its copy also where a person's action stalls the rotation.",
        f"{_COPY_TESTS}::test_replacement_written_again_by_a_killed_worker_has_one_copy",
    ),
    Guard(
        "tripwire-known-source",
        "keyvault/services/usage/reports.py",
        "UseAttempts(max(tried, default=None), known_at)",
        "UseAttempts(max(tried, default=None), max(tried, default=None))",
        "Only a source that used the key itself reinstates it.",
        f"{_TRIPWIRE_TESTS}::test_attempt_from_an_unknown_source_raises_an_alarm_and_delays_nothing",
    ),
    Guard(
        "tripwire-source-with-a-product",
        "keyvault/services/usage/recorder.py",
        "name = name_source(row[2], row[3])\n",
        'name = name_source(row[2], "shop")\n',
        "Another client in the network of a known source does not reinstate the key.",
        "tests/services/usage/test_reports.py::test_source_is_a_network_with_a_product",
    ),
    Guard(
        "tripwire-undistinguished-clients",
        "keyvault/services/usage/reports.py",
        " & ~Q(name=OTHERS)",
        "",
        "A client beyond the limit of a reporter, which can be any client, does not reinstate the key.",
        "tests/services/usage/test_reports.py::test_clients_that_are_not_distinguished_are_never_known",
    ),
    Guard(
        "tripwire-refused-adds-no-source",
        "keyvault/services/usage/recorder.py",
        "AND (max(allowed_at) IS NOT NULL OR max(denied_at) IS NOT NULL OR (<source>) IS NOT NULL)",
        "",
        "A flood of a suspended key adds no sources, whose number the tripwire's cost depends on.",
        "tests/services/usage/test_reports.py::test_attempts_by_many_unknown_sources_add_no_source",
        database="postgres",
    ),
    Guard(
        "tripwire-source-kept-while-refused",
        "keyvault/services/usage/retention.py",
        " & ~Q(refused_at__gte=oldest)",
        "",
        "A known source that still tries the key stays known.",
        "tests/services/usage/test_retention.py::test_source_that_still_tries_a_suspended_key_is_kept",
    ),
    Guard(
        "tripwire-unknown-behind-known",
        "keyvault/services/usage/reports.py",
        " or [UseAttempt(OTHERS, unknown[0], is_known=False)]",
        "",
        "Clients of known sources do not hide that an unknown source tried the key.",
        "tests/services/usage/test_reports.py::test_unknown_source_is_found_behind_many_newer_clients_of_known_ones",
    ),
    Guard(
        "tripwire-source-seen-before",
        "keyvault/services/usage/reports.py",
        "was_used = Q(first_minute__lt=minute) | Q(last_at__lt=before) | Q(denied_at__lt=before)",
        "was_used = Q()",
        "A source is known only by a use before the quarantine.",
        "tests/services/usage/test_reports.py::test_source_is_known_after_an_earlier_use",
    ),
    Guard(
        "tripwire-proved-key",
        _VERIFICATION,
        "if not peppers.matches(keystring.text, record.digest, record.pepper_version):",
        "if record.state is not KeyState.SUSPENDED and not peppers.matches(keystring.text, record.digest, "
        "record.pepper_version):",
        "Only the proved key leaves an attempt in quarantine, which may reinstate it.",
        f"{_JUDGING_TESTS}::test_attempt_on_a_suspended_key_is_recorded_only_with_proof",
    ),
    Guard(
        "tripwire-once",
        _STATES,
        "and not was_reinstated\n",
        "\n",
        "An attempt in quarantine reinstates the predecessor once.",
        f"{_TRIPWIRE_TESTS}::test_predecessor_is_reinstated_once",
    ),
    Guard(
        "ledger-before-the-side-effect",
        "rotation/services/rotations/side_effects.py",
        "return entry or LedgerEntry.objects.create(",
        "return entry or LedgerEntry(",
        "A ledger row precedes each side effect.",
        "tests/rotation/services/rotations/test_late_writes.py::test_rotation_aborted_during_a_write_makes_that_write_fail",
    ),
    Guard(
        "replacement-sealed-to-its-recipient",
        "rotation/services/rotations/side_effects.py",
        "recipient = _recipient_of(rotation)",
        "recipient = None",
        "The replacement of a sealed key is sealed to the same recipient.",
        f"{_DELIVERY_TESTS}::test_sealed_replacement_is_collectable_with_the_backend_down",
    ),
    # --- campaigns ------------------------------------------------------------------------------------------
    Guard(
        "paused-campaign-takes-no-turn",
        _RUNNER,
        "elif campaign.state != C.RUNNING:",
        "elif campaign.state == C.HALTED:",
        "A paused campaign neither begins rotations nor halts nor completes.",
        f"{_RUNNER_TESTS}::test_pause_lasts_until_resumed_whatever_its_rotations_do",
    ),
    Guard(
        "start-serialized-with-a-pause",
        _RUNNER,
        "Campaign.objects.select_for_update(no_key=True).filter(",
        "Campaign.objects.filter(",
        "After a pause has returned, no rotation of the campaign begins.",
        f"{_RUNNER_TESTS}::test_race_of_a_start_with_a_faster_pause_starts_nothing",
        "postgres",
    ),
    Guard(
        "start-refused-after-a-pause",
        _RUNNER,
        ".filter(pk=campaign.pk, state=C.RUNNING)",
        ".filter(pk=campaign.pk)",
        "A worker that read a campaign before its pause begins nothing.",
        f"{_RUNNER_TESTS}::test_tick_overtaken_by_a_pause_skips_nobody",
    ),
    Guard(
        "scheduled-start-serialized-with-a-withdrawal",
        _STARTING,
        "type(row).objects.select_for_update(no_key=True).filter(",
        "type(row).objects.filter(",
        "No rotation is committed under a standing approval that has ended.",
        "tests/rotation/services/schedules/test_standing_approvals.py"
        "::test_end_of_a_standing_approval_waits_for_a_rotation_that_begins_under_it",
        "postgres",
    ),
    Guard(
        "scheduled-start-refused-after-a-change",
        _STARTING,
        ".filter(pk=row.pk, version=row.version)",
        ".filter(pk=row.pk)",
        "A worker that read a schedule before it was disabled begins nothing.",
        "tests/rotation/services/schedules/test_starting.py"
        "::test_schedule_disabled_during_a_batch_begins_no_further_rotation",
    ),
    Guard(
        "altered-campaign-begins-nothing",
        _RUNNER,
        "    if not is_unaltered(campaign):\n",
        "    if campaign.state == C.HALTED:\n",
        "A campaign that was altered after its approval begins no rotation.",
        f"{_CAMPAIGN_TESTS}::test_tick_of_a_campaign_altered_after_its_approval_begins_nothing",
    ),
    Guard(
        "only-a-running-campaign-is-paused",
        "rotation/services/campaigns/campaigns.py",
        "_require_state(campaign, C.RUNNING)\n    return _enter(grant, campaign, P.ROTATIONS_WRITE, C.PAUSED",
        "return _enter(grant, campaign, P.ROTATIONS_WRITE, C.PAUSED",
        "A halted campaign is not paused, because a paused one is resumed without a reason.",
        f"{_CAMPAIGN_TESTS}::test_pause_resume_and_cancel_in_other_states_are_refused",
    ),
    # --- usage ----------------------------------------------------------------------------------------------
    Guard(
        "watermark-before-the-counts",
        "keyvault/services/usage/recorder.py",
        "return Report(self.reporter_id, 0, through, is_final",
        "return Report(self.reporter_id, 0, self.now(), is_final",
        "A report's watermark is taken before its counts, so that silence covers no use that is not in it.",
        f"{_USAGE_TESTS}::test_usage_noted_while_a_report_is_taken_is_newer_than_its_watermark",
    ),
    Guard(
        "watermark-of-the-slowest-verifier",
        "keyvault/services/usage/recorder.py",
        'through=Min("flushed_through_at", filter=_LIVE)',
        'through=Max("flushed_through_at", filter=_LIVE)',
        "Silence advances to the watermark of the slowest live verifier.",
        f"{_USAGE_TESTS}::test_usage_silence_ends_at_the_slowest_live_reporter",
    ),
    # --- verdicts -------------------------------------------------------------------------------------------
    Guard(
        "key-of-its-environment",
        _VERIFICATION,
        "if keystring.scope is not STRING_SCOPE[environment]:",
        "if keystring.scope not in STRING_SCOPE.values():",
        "A key is valid in its own environment only.",
        f"{_VERIFICATION_TESTS}::test_read_key_of_the_other_environment_names_the_right_base_url",
    ),
    Guard(
        "secret-compared",
        _VERIFICATION,
        "if not peppers.matches(keystring.text, record.digest, record.pepper_version):",
        "if record.pepper_version not in peppers.versions:",
        "A key is proved by its whole secret.",
        f"{_VERIFICATION_TESTS}::test_judge_key_with_any_digit_of_the_secret_changed_is_invalid",
    ),
    Guard(
        "key-of-its-merchant",
        _DECISION,
        "if named <= {holder.merchant_id}:",
        "if named <= {holder.merchant_id} or request.named_merchant is not None:",
        "A key is valid for its own merchant only.",
        f"{_DECISION_TESTS}::test_decide_any_other_merchant_is_a_mismatch",
    ),
    Guard(
        "key-of-a-merchant-in-scope",
        _JUDGEMENT,
        "return holder is not None and (scope is None or holder.merchant_id in scope)",
        "return holder is not None",
        "A service token sees only the keys of its own merchants.",
        f"{_JUDGING_TESTS}::test_scope_without_the_key_s_merchant_denies_it_as_unknown",
    ),
    Guard(
        "private-key-beside-a-bearer",
        _DECISION,
        "if holder.kind in endpoint.credentials:",
        "if holder.kind in endpoint.credentials or request.has_bearer:",
        "An endpoint that takes the private key requires it although a customer token is present.",
        f"{_DECISION_TESTS}::test_decide_bearer_never_replaces_the_key",
    ),
    Guard(
        "customer-token-of-the-account",
        "keyvault/access/customers.py",
        "(record.environment, record.merchant_id) != (holder.environment, holder.merchant_id)",
        "record.environment != holder.environment",
        "A customer token is valid beside a key of its own account only.",
        "tests/access/test_customers.py::test_judge_token_with_another_account_s_key_is_invalid",
    ),
    Guard(
        "retry-after-of-a-429",
        _JUDGEMENT,
        "retry_after_seconds=spend.retry_after_seconds,",
        "",
        "A denial by a limit says when to try again.",
        f"{_JUDGING_TESTS}::test_limit_of_ten_refuses_the_eleventh_request",
    ),
    Guard(
        "revoked-key-evicted-on-its-host",
        _ENGINE,
        "self._evict(subjects)\n            self._generation_memory",
        "self._generation_memory",
        "Once a revocation has returned, no process of its host answers with the old record.",
        f"{_MEMORY_TESTS}::test_engine_key_revoked_on_its_host_is_refused_at_the_next_request",
    ),
    Guard(
        "host-notified-after-the-commit",
        "keyvault/services/recording/changes.py",
        "transaction.on_commit(partial(notify_host, tuple(subjects)))",
        "partial(notify_host, tuple(subjects))",
        "A committed change notifies the processes of its host before its author gets the answer.",
        "tests/services/recording/test_changes.py::test_service_notifies_the_host_of_its_change_rows",
    ),
    Guard(
        "stale-memory-unused",
        "keyvault/hotpath/engine/freshness.py",
        "(monotonic + self.bound_seconds, offset - _STEP_SECONDS, offset + _STEP_SECONDS)",
        '(float("inf"), offset - _STEP_SECONDS, offset + _STEP_SECONDS)',
        "A verifier that cannot confirm its memory reads the database, and answers 503 when it cannot.",
        f"{_MEMORY_TESTS}::test_engine_that_is_stale_and_cannot_read_allows_nothing",
    ),
    Guard(
        "lost-database-is-503",
        "keyvault/services/verification/judging.py",
        "return deny_stale(error.detail, error.internal)",
        "raise",
        "Without its database the slow path denies with 503 and allows nothing.",
        f"{_JUDGING_TESTS}::test_database_lost_denies_as_stale",
    ),
    # --- keys -----------------------------------------------------------------------------------------------
    Guard(
        "dead-key-stays-dead",
        "keyvault/domain/keys.py",
        "KeyState.DEACTIVATED: frozenset({KeyState.COMPROMISED,",
        "KeyState.DEACTIVATED: frozenset({KeyState.ACTIVE, KeyState.COMPROMISED,",
        "No transition leads from a dead key to a living one.",
        "tests/domain/test_keys.py::test_transitions_nothing_leads_from_a_dead_state_to_a_living_one",
    ),
    Guard(
        "dead-key-stays-dead-in-the-database",
        _RULES,
        'f"OLD.state IN {states} AND {left}"',
        '"1 = 0"',
        "The database rejects every write that revives a dead key.",
        _TRIGGER_TESTS,
    ),
    Guard(
        "two-active-keys",
        _LIFECYCLE,
        "if verifying.count() >= MAX_VERIFYING:",
        "if verifying.count() > MAX_VERIFYING:",
        "At most two keys of a credential verify.",
        "tests/services/keys/test_lifecycle.py::test_key_activated_as_the_third_of_a_credential_is_refused",
    ),
    Guard(
        "own-key-only",
        _LIFECYCLE,
        "or grant.principal.key_id != key.key_id:",
        ":",
        "A key revokes itself and no other key.",
        "tests/api/test_integration_revoke_self.py::test_revoke_self_cannot_revoke_another_key_of_the_account",
    ),
    # --- approvals ------------------------------------------------------------------------------------------
    Guard(
        "second-person",
        _FOUR_EYES,
        "if operator.person == row.requester_person:",
        "if not operator.person:",
        "A requester does not approve their own request.",
        f"{_ISSUANCE_TESTS}::test_issuance_approved_by_the_requester_with_a_grant_for_another_is_refused",
    ),
    Guard(
        "second-person-in-the-grant",
        _DECISION,
        "isinstance(principal, OperatorPrincipal) and principal.person != target.requester_person",
        "isinstance(principal, OperatorPrincipal)",
        "A requester gets no grant to approve their own request.",
        f"{_ISSUANCE_TESTS}::test_issuance_requester_gets_no_grant_to_approve",
    ),
    Guard(
        "approved-together-as-shown",
        "keyvault/admin/oversight/approvals.py",
        "if each.fault or not _is_as_shown(request, each)]",
        "if each.fault]",
        "A request that was changed since the page was shown is approved with no other.",
        f"{_TOGETHER_TESTS}::test_approvals_together_approve_nothing_if_one_was_changed",
    ),
    Guard(
        "approved-together-under-one-digest",
        "keyvault/admin/oversight/approvals.py",
        "if request.POST.get(_COMBINED) != _combine(reviewed):",
        "if False:",
        "An approval of several requests names the digest over all that the page showed.",
        f"{_TOGETHER_TESTS}::test_approvals_together_need_the_combined_digest",
    ),
    Guard(
        "operator-within-its-scope",
        _DECISION,
        "or principal.scope.covers(target.scope)",
        "or target.merchant_id is not None or principal.scope.covers(target.scope)",
        "An operator gets no grant for an account outside of its scope.",
        "tests/access/test_scopes.py::test_operator_outside_of_its_scope_finds_nothing",
    ),
    Guard(
        "console-rows-in-scope",
        "keyvault/admin/framework/model_admin.py",
        "return self.rows_in_scope(super().get_queryset(request), operator_of(request).scope)",
        "return super().get_queryset(request)",
        "No page of the console shows a row outside of the operator's scope.",
        "tests/admin/framework/test_scope.py::test_scope_of_another_merchant_shows_no_id_of_it",
    ),
    Guard(
        "own-operator-stays",
        "keyvault/services/operators/operators.py",
        "grant.principal.person == operator.person:",
        "not grant.principal.person:",
        "No person changes their own operator, or approves a change of it.",
        f"{_OPERATOR_TESTS}::test_change_of_ones_own_operator_is_refused",
    ),
    Guard(
        "approving-roles-under-four-eyes",
        _OPERATOR_CHANGES,
        "if chosen - operator.roles & FOUR_EYES_ROLES and not",
        "if not chosen and not",
        "No single key administrator makes an operator an approver.",
        f"{_OPERATOR_TESTS}::test_role_added_by_one_person_is_no_approving_one",
    ),
    Guard(
        "change-approved-by-no-person-concerned",
        _OPERATOR_CHANGES,
        "operator = get_operator_of(change)\n    require_another_person(grant, operator)\n",
        "operator = get_operator_of(change)\n",
        "No person approves a change of their own operator, under none of their logins.",
        f"{_OPERATOR_TESTS}::test_change_is_approved_neither_by_its_requester_nor_by_the_person_concerned",
    ),
    Guard(
        "change-of-the-approved-roles",
        _OPERATOR_CHANGES,
        "if change.plan_digest != _digest(change, operator):",
        "if not change.plan_digest:",
        "An approval covers the operator's roles before and after, as the approver saw them.",
        f"{_OPERATOR_TESTS}::test_change_of_an_operator_that_was_changed_meanwhile_is_refused",
    ),
    Guard(
        "approving-persons-who-can-sign-in",
        _APPROVING_PERSONS,
        "holders.filter(_has_factor()).exclude(",
        "holders.exclude(",
        "A person without a second factor replaces no approving person who has one.",
        f"{_APPROVING_TESTS}[disable]",
    ),
    Guard(
        "approving-persons-keep-their-factors",
        _APPROVING_PERSONS,
        "_held_by(operator.person, roles, scope) if keeps_factors else frozenset()",
        "_held_by(operator.person, roles, scope)",
        "No reset of second factors leaves fewer than two approving persons who have one.",
        f"{_APPROVING_TESTS}[reset]",
    ),
    Guard(
        "second-person-in-the-database",
        _RULES,
        'f"EXISTS ({requested} AND r.requester_person = NEW.person)"',
        '"1 = 0"',
        "The database takes no approval by the requester.",
        f"{_ISSUANCE_TESTS}::test_issuance_approved_by_the_requester_is_refused_by_the_database",
    ),
    Guard(
        "approval-of-the-shown-digest",
        _FOUR_EYES,
        "if shown_digest != row.plan_digest:",
        "if not shown_digest:",
        "An approval counts for the plan that was shown, and for no other.",
        f"{_ISSUANCE_TESTS}::test_issuance_approved_with_another_digest_is_refused",
    ),
    Guard(
        "approval-digest-in-the-database",
        _RULES,
        'f"NOT EXISTS ({requested} AND r.plan_digest = NEW.plan_digest)"',
        '"1 = 0"',
        "The database takes no approval of another digest.",
        _TRIGGER_TESTS,
    ),
    Guard(
        "claim-reviewed-by-two",
        _BREAK_GLASS,
        "is_last = not action.is_claimed or",
        "is_last = action.is_claimed or",
        "One other person does not close an approval that was claimed on a command line.",
        f"{_BREAK_GLASS_TESTS}::test_break_glass_claim_is_closed_by_two_others",
    ),
    Guard(
        "claim-of-one-of-several",
        _FOUR_EYES,
        "is_claimed(operator) and row.approvals_needed > 1",
        "row.approvals_needed < 1",
        "One of several approvers does not claim another on a command line.",
        f"{_BREAK_GLASS_TESTS}::test_approval_on_the_command_line_is_refused_where_several_are_needed",
    ),
    Guard(
        "claimed-approvers-review-nothing",
        _BREAK_GLASS,
        "if list_unreviewed_changes().filter(operator__username=username).exists()",
        "if not list_unreviewed_changes()",
        "Approvers made on a command line do not review each other.",
        "tests/services/test_operator_changes.py"
        "::test_approvers_made_on_a_command_line_neither_review_each_other_nor_approve",
    ),
    Guard(
        "claimed-request-is-noted",
        _FOUR_EYES,
        "elif is_requester_claimed:",
        "elif not is_requester_claimed:",
        "An approver with a shell does not request in another's name unnoticed.",
        f"{_BREAK_GLASS_TESTS}::test_break_glass_request_claimed_for_another_takes_one_more_person",
    ),
    Guard(
        "approvers-review-no-other",
        _FOUR_EYES,
        "if earlier:",
        "if not earlier:",
        "Approvers of one claimed request do not review each other.",
        f"{_BREAK_GLASS_TESTS}::test_break_glass_approvals_of_a_claimed_request_are_not_reviewed_by_each_other",
    ),
    Guard(
        "claimed-token-is-noted",
        "keyvault/services/tokens/service_tokens.py",
        "is_creator_claimed=is_claimed(grant.principal)",
        "is_creator_claimed=creator is None",
        "A token that a command line creates in an operator's name does not prove that operator.",
        f"{_BREAK_GLASS_TESTS}::test_break_glass_approval_of_a_request_by_a_claimed_token_is_noted",
    ),
    Guard(
        "collector-reviews-nothing",
        _BREAK_GLASS,
        "return person in action.excluded_persons.split()",
        "return person == action.requester_person",
        "Who collected a key does not review its approval.",
        "tests/rotation/services/rotations/test_requests.py::test_replacement_collector_does_not_review_its_approval",
    ),
    Guard(
        "sealed-to-the-approved-recipient",
        "keyvault/services/issuance/collection.py",
        "if request.plan_digest != request.plan().digest():",
        "if not request.plan_digest:",
        "A key is sealed to the recipient that was approved.",
        f"{_COLLECTION_TESTS}::test_service_request_with_a_recipient_changed_after_issuance_is_not_handed_over",
    ),
    Guard(
        "production-key-sealed",
        "keyvault/services/issuance/collection.py",
        "if environment == Environment.PRODUCTION and not is_sealed:",
        "if environment == Environment.PRODUCTION and is_sealed:",
        "A production key is handed to a service only sealed.",
        f"{_COLLECTION_TESTS}::test_collection_of_an_unsealed_production_key_is_refused",
    ),
    # --- operators' sessions --------------------------------------------------------------------------------
    Guard(
        "second-factor-to-sign-in",
        "keyvault/admin/site.py",
        "return self.has_passed_password(request) and has_passed_second_factor(request.session)",
        "return self.has_passed_password(request)",
        "A password without the second factor opens no page.",
        f"{_ENFORCEMENT_TESTS}::test_enforcement_password_alone_opens_nothing",
    ),
    Guard(
        "unmarked-view-closed",
        "keyvault/admin/framework/middleware.py",
        "getattr(callback, _OPEN, False)",
        "getattr(callback, _OPEN, True)",
        "A view below /admin/ is closed unless it is marked as open before the sign-in.",
        f"{_ENFORCEMENT_TESTS}::test_enforcement_view_that_is_not_marked_is_closed",
    ),
    Guard(
        "recent-factor-for-the-action",
        "keyvault/admin/framework/model_admin.py",
        "return refuse_step_up(request) if action.step_up else None",
        "return refuse_step_up(request) if not action.step_up else None",
        "A sensitive action is refused without a recent second factor.",
        f"{_STEP_UP_TESTS}::test_step_up_without_the_right_code_changes_nothing_and_keeps_the_input",
    ),
    Guard(
        "age-of-a-recent-factor",
        "keyvault/services/sessions/step_up.py",
        "checked_at is not None and now - checked_at < STEP_UP",
        "checked_at is not None and checked_at <= now",
        "A second factor is recent for five minutes.",
        f"{_STEP_UP_TESTS}::test_step_up_after_five_minutes_asks_for_a_code_in_the_form",
    ),
    Guard(
        "session-ends-unused",
        _SESSIONS,
        "return min(used_at + idle, started_at + absolute)",
        "return started_at + absolute",
        "A session that is not used ends.",
        f"{_SESSION_TESTS}::test_session_in_use_is_extended",
    ),
    Guard(
        "session-ends-in-use",
        _SESSIONS,
        "return min(used_at + idle, started_at + absolute)",
        "return used_at + idle",
        "A session ends eight hours after its start, however often it is used.",
        f"{_SESSION_TESTS}::test_session_in_use_ends_eight_hours_after_its_start",
    ),
    Guard(
        "guesses-of-a-factor-locked",
        "keyvault/services/sessions/lockout.py",
        "            if attempt.is_locked:\n",
        "            if attempt.is_locked and self.what == PASSWORD:\n",
        "After ten failures no second factor is checked.",
        f"{_FACTOR_TESTS}::test_guesses_of_second_factors_lock_before_the_code_is_checked",
    ),
    Guard(
        "code-used-once",
        _SECOND_FACTORS,
        'if counter > data.get("last_counter", -1) else None',
        'if counter >= data.get("last_counter", -1) else None',
        "A code of an authenticator app is accepted once.",
        f"{_FACTOR_TESTS}::test_totp_code_is_accepted_once",
    ),
    Guard(
        "id-token-key-of-its-algorithm",
        _ID_TOKENS,
        'key.get("kty") == KEY_TYPES[algorithm]\n        and "d" not in key\n',
        '"kty" in key\n        and "d" not in key\n',
        "The algorithm of an ID token fits the type of the provider's key.",
        f"{_TOKEN_TESTS}::test_id_token_of_a_published_symmetric_key_is_refused",
    ),
    Guard(
        "id-token-for-this-client",
        _SINGLE_SIGN_ON,
        "if not _is_for(claims, provider.client_id):",
        'if not claims.get("aud"):',
        "An ID token for another client of the identity provider is refused.",
        f"{_CLAIM_TESTS}::test_single_sign_on_a_wrong_claim_is_refused",
    ),
    Guard(
        "id-token-for-this-sign-in",
        _SINGLE_SIGN_ON,
        'if not _is_equal(claims.get("nonce"), authorization.nonce):',
        'if not claims.get("nonce"):',
        "An ID token of another sign-in is refused.",
        f"{_CLAIM_TESTS}::test_single_sign_on_a_wrong_claim_is_refused",
    ),
    Guard(
        "factor-that-the-provider-proves",
        _SINGLE_SIGN_ON,
        "if proved.isdisjoint(provider.second_factors):",
        "if not provider.second_factors:",
        "Only a configured claim of the identity provider proves a second factor.",
        f"{_CLAIM_TESTS}::test_single_sign_on_only_a_configured_claim_proves_a_second_factor",
    ),
    # --- records --------------------------------------------------------------------------------------------
    Guard(
        "compare-and-swap",
        _RECORDING,
        "filter(pk=self.pk, version=self.version)",
        "filter(pk=self.pk)",
        "A row that changed since it was read is not overwritten.",
        f"{_RECORDING_TESTS}::test_recorded_model_swap_of_a_stale_row_raises_and_writes_nothing",
    ),
    Guard(
        "no-unrecorded-write",
        _RECORDING,
        "if subjects is None:\n        raise UnrecordedWriteError(",
        "if subjects is None:\n        return {}\n        raise UnrecordedWriteError(",
        "No row is written without an audit entry.",
        f"{_RECORDING_TESTS}::test_recorded_model_written_outside_a_recorded_block_raises",
    ),
    Guard(
        "audit-entry-in-the-transaction",
        _TRANSACTION,
        "with transaction.atomic():\n            with collect_subjects() as subjects:",
        "if True:\n            with collect_subjects() as subjects:",
        "A change and its audit entry share one transaction.",
        f"{_TRANSACTION_TESTS}::test_service_whose_entry_cannot_be_written_changes_nothing",
    ),
    Guard(
        "grant-for-this-place",
        _TRANSACTION,
        "and (grant.target.environment, grant.target.merchant_id) == scope",
        "",
        "A grant for one account permits no write on another.",
        f"{_TRANSACTION_TESTS}::test_recorded_with_a_grant_for_another_place_is_refused",
    ),
    Guard(
        "grant-within-these-accounts",
        _TRANSACTION,
        "not grant.target.within.covers(within)",
        "not within.covers(within)",
        "A grant for some accounts permits no write that concerns others.",
        f"{_TRANSACTION_TESTS}::test_recorded_on_more_than_the_grant_is_within_is_refused",
    ),
    Guard(
        "append-only-update",
        _RULES,
        'WriteGuard(f"{short}_no_update", self.table, "UPDATE", "1 = 1", message)',
        'WriteGuard(f"{short}_no_update", self.table, "UPDATE", "1 = 0", message)',
        "The database changes no audit entry, approval or evidence.",
        _TRIGGER_TESTS,
    ),
    Guard(
        "append-only-delete",
        _RULES,
        '"1 = 1", message)\n        yield WriteGuard(f"{short}_no_delete", self.table, "DELETE"',
        '"1 = 1", message)\n        yield WriteGuard(f"{short}_no_delete", self.table, "UPDATE"',
        "The database deletes no audit entry, approval or evidence.",
        _TRIGGER_TESTS,
    ),
    Guard(
        "log-signed-only-with-its-recorded-checkpoints",
        _CHECKPOINTS,
        "    _require_marked(scope, signed, marks)\n",
        "",
        "The worker signs no log whose checkpoints differ from those that are recorded outside the database.",
        f"{_MARK_TESTS}::test_sign_due_of_a_log_rewritten_without_its_checkpoints_is_refused",
    ),
    Guard(
        "log-signed-only-with-its-recorded-entries",
        _CHECKPOINTS,
        "    if chains and not is_marked:\n",
        "    if False:\n",
        "The worker signs no log that was rewritten below a recorded checkpoint.",
        f"{_MARK_TESTS}::test_rewritten_log_below_a_forged_checkpoint_is_not_signed",
    ),
    Guard(
        "lost-revocation-log",
        _STARTUP,
        "if not _append(open_revocation_log):",
        "if _append(open_revocation_log) is None:",
        "Nothing starts without the revocation log once a key or token was issued.",
        "tests/services/revocations/test_log_opening.py::"
        "test_start_without_the_log_of_an_issued_key_or_token_is_refused",
    ),
    Guard(
        "revoked-keys-valid-again",
        _STARTUP,
        "    if found.lost:\n",
        "    if found.lost and not found.highest:\n",
        "Nothing starts on a database in which a key of the revocation log is valid again.",
        f"{_REPLAY_TESTS}::test_replay_reapplies_every_kind_of_revocation",
    ),
    Guard(
        "database-behind-its-log",
        _STARTUP,
        "    if found.counter < found.highest:\n",
        "    if found.counter < 0:\n",
        "Nothing starts on a database whose newest change is older than the revocation log.",
        f"{_REPLAY_TESTS}::test_replay_advances_the_sequence_so_that_no_receipt_goes_back",
    ),
    Guard(
        "idempotency-body",
        "keyvault/services/idempotency.py",
        "if bytes(found.body_digest) != scope.body_digest:",
        "if not found.body_digest:",
        "An idempotency key replays no reply for another body.",
        "tests/services/test_idempotency.py::test_idempotency_key_with_another_body_is_refused_without_effect",
    ),
    # --- secrets --------------------------------------------------------------------------------------------
    Guard(
        "check-and-set",
        "keyvault/backends/local.py",
        "if _newest_version(connection, mount, path) != expected_version:",
        "if _newest_version(connection, mount, path) < expected_version:",
        "A stored copy is written only on top of the version that its writer saw.",
        "tests/backends/test_contract.py::test_put_after_an_outdated_version_conflicts",
    ),
    Guard(
        "foreign-copy-not-overwritten",
        _COPIES,
        'if stored.labels.get("credential_id") != credential.credential_id:',
        'if not stored.labels.get("credential_id", "-"):',
        "A copy that Keyvault did not write stalls the rotation and is not overwritten.",
        f"{_ENGINE_TESTS}::test_foreign_writer_stalls_and_is_not_overwritten",
    ),
    Guard(
        "first-copy-fenced",
        "keyvault/services/issuance/requests.py",
        "after=before, fence=lambda: renew(lease, clock())",
        "after=before",
        "A worker that lost its lease stores no key of an issuance request.",
        _SLOW_ISSUANCE_TESTS,
    ),
    Guard(
        "stored-copy-fenced",
        _COPIES,
        "    fence()\n    try:\n        return secret_backend().put(",
        "    try:\n        return secret_backend().put(",
        "A copy is written only after its fence.",
        _SLOW_ISSUANCE_TESTS,
    ),
    Guard(
        "soft-deletion-fenced",
        _COPIES,
        "renew(lease, clock())\n        secret_backend().soft_delete(",
        "secret_backend().soft_delete(",
        "A worker that lost its lease hides no copy of a valid key.",
        f"{_SETTLING_TESTS}[True]",
    ),
    Guard(
        "undeletion-fenced",
        _COPIES,
        "renew(lease, clock())\n        try:\n            secret_backend().undelete(",
        "try:\n            secret_backend().undelete(",
        "A worker that lost its lease restores no copy of a key in quarantine.",
        f"{_SETTLING_TESTS}[False]",
    ),
    Guard(
        "copy-of-this-key",
        _COPIES,
        'if stored.labels.get("key_id") != key.key_id:\n        raise ForeignWriterError',
        'if not stored.labels.get("key_id", "-"):\n        raise ForeignWriterError',
        "The string of one key is never returned as that of another.",
        f"{_STORED_TESTS}::test_string_of_another_key_at_the_version_of_this_one_is_not_returned",
    ),
    Guard(
        "log-redacted",
        "keyvault/project/logs.py",
        "redact(json.dumps({name: redact(text) for name, text in line.items()}))",
        "json.dumps(line)",
        "No key reaches a log line.",
        "tests/domain/test_log_lines.py::test_log_line_shows_no_secret_whichever_way_it_came",
    ),
    Guard(
        "audit-details-redacted",
        _TRANSACTION,
        "if isinstance(value, str):\n        return redact(value)",
        "if isinstance(value, str):\n        return value",
        "No key reaches an audit entry.",
        f"{_TRANSACTION_TESTS}::test_recorded_details_are_redacted_at_every_depth",
    ),
    # --- entry points and the disk ---------------------------------------------------------------------------
    Guard(
        "plane-not-served",
        "keyvault/api/middleware.py",
        "        if not _is_served(request.path_info):\n            raise Http404\n",
        "",
        "A process answers no path of a plane that it does not serve.",
        "tests/project/test_planes.py::test_process_answers_its_planes_and_health_checks_only",
    ),
    Guard(
        "reserve-for-revocations",
        "keyvault/services/recording/revocation_log.py",
        "if not is_out_of_space(error) or not release_reserve():\n                raise",
        "raise",
        "A full disk costs no line of the revocation log as long as there is a reserve.",
        "tests/project/test_full_disk.py::test_revocation_is_logged_from_the_reserve_when_a_write_finds_no_space",
    ),
    Guard(
        "incompatible-release",
        "keyvault/services/startup/startup_checks.py",
        "    if not _is_compatible(oldest):\n",
        "    if not oldest:\n",
        "An older release does not start on a schema that a newer one has made incompatible.",
        "tests/project/test_start.py::test_start_on_a_newer_schema_is_refused_in_one_line",
    ),
    # --- backups and keys of the installation ----------------------------------------------------------------
    Guard(
        "no-evidence-in-a-backup",
        "keyvault/services/backups/keystores.py",
        '        copy.execute("DELETE FROM records WHERE mount = ?", (Mount.EVIDENCE,))\n',
        "",
        "The revocation anchor is never restored together with the database.",
        "tests/services/backups/test_keystores.py::test_copy_has_the_secrets_and_not_the_evidence",
    ),
    Guard(
        "rotation-alone",
        "keyvault/backends/local_rekeying.py",
        "fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        "No process writes to the keystore with the former master key during a rotation.",
        "tests/services/secrets/test_master_key.py"
        "::test_master_key_rotation_is_refused_while_a_process_has_the_keystore_open",
    ),
)
