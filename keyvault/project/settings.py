"""Django's settings, safe by default. Every choice of the host comes from `configuration`."""

import ssl
import sys
from pathlib import Path
from urllib.parse import urlsplit

import dj_database_url
from django.core.exceptions import ImproperlyConfigured
from kombu import Exchange, Queue

from keyvault.access.limits import SESSION_SECONDS
from keyvault.backends.private_files import (
    ensure_private_directory,
    ensure_private_file,
    find_recent_secret,
    read_or_make_secret,
)
from keyvault.domain.networks import IPNetwork
from keyvault.domain.origins import to_domain
from keyvault.domain.plaintext import Plaintext
from keyvault.project.configuration import (
    ROOT,
    SmtpServer,
    find_alarm_channels,
    find_base_urls,
    find_identity_provider,
    read_settings,
)
from keyvault.project.file_broker import EXCHANGE, prepare_folder

_values = read_settings()

# --- the host's choices -----------------------------------------------------------------------------------

try:
    DATA_DIR = ensure_private_directory(ROOT / Path(_values["KEYVAULT_DATA_DIR"]))
except OSError as _error:
    raise ImproperlyConfigured(f"KEYVAULT_DATA_DIR: {_error.filename} cannot be created: {_error.strerror}") from None
KEY_PREFIX: str = _values["KEYVAULT_KEY_PREFIX"]
ORIGIN: str = _values["KEYVAULT_ORIGIN"]
CONSOLE_ORIGIN = to_domain(_values["KEYVAULT_CONSOLE_ORIGIN"] or ORIGIN)
BASE_URLS = find_base_urls(_values)
APPROVALS_NEEDED = {
    "sandbox": _values["KEYVAULT_SANDBOX_APPROVALS"],
    "production": _values["KEYVAULT_PRODUCTION_APPROVALS"],
}
ENVIRONMENTS: tuple[str, ...] = _values["KEYVAULT_ENVIRONMENTS"]
PLANES: tuple[str, ...] = _values["KEYVAULT_PLANES"]
IS_METRICS_PATH_SERVED: bool = _values["KEYVAULT_METRICS"] == "on"
METRICS_ADDRESS: tuple[str, int] | None = (
    None if isinstance(_values["KEYVAULT_METRICS"], str) else _values["KEYVAULT_METRICS"]
)
ARE_DOCS_SERVED: bool = _values["KEYVAULT_DOCS"] == "on"
REDIS_URL: str = _values["KEYVAULT_REDIS_URL"]
TRUSTED_PROXIES: int = _values["KEYVAULT_TRUSTED_PROXIES"]
ACCOUNT_LIMITS: dict[str, tuple[int, int]] = {
    "sandbox": _values["KEYVAULT_SANDBOX_LIMIT"],
    "production": _values["KEYVAULT_PRODUCTION_LIMIT"],
}
LIMIT_FALLBACK_PERCENT: int = _values["KEYVAULT_LIMIT_FALLBACK_PERCENT"]
IS_STRICT_LIMITS: bool = _values["KEYVAULT_LIMIT_MODE"] == "strict"
MAX_STALENESS_SECONDS: float = _values["KEYVAULT_MAX_STALENESS"]
VERIFIER_KEYS: int = _values["KEYVAULT_VERIFIER_KEYS"]
USAGE_MINUTE_DAYS: int = _values["KEYVAULT_USAGE_MINUTE_DAYS"]
USAGE_HOUR_DAYS: int = _values["KEYVAULT_USAGE_HOUR_DAYS"]
USAGE_DAYS: int = _values["KEYVAULT_USAGE_DAYS"]
REVOCATION_LOG = DATA_DIR / _values["KEYVAULT_REVOCATION_LOG"]
WEBHOOK_NETWORKS: tuple[IPNetwork, ...] = _values["KEYVAULT_WEBHOOK_NETWORKS"]
ALARM_EMAILS: tuple[str, ...] = _values["KEYVAULT_ALARM_EMAILS"]
ALARM_WEBHOOK: str = _values["KEYVAULT_ALARM_WEBHOOK"]
ALARM_WEBHOOK_SECRET = Plaintext(_values["KEYVAULT_ALARM_WEBHOOK_SECRET"])
ALARM_REPEAT_SECONDS: int = _values["KEYVAULT_ALARM_REPEAT_MINUTES"] * 60
ALARM_CHANNELS = find_alarm_channels(_values)
REFUSAL_DAYS: int = _values["KEYVAULT_REFUSAL_DAYS"]
CUSTOMER_TOKEN_DAYS: int = _values["KEYVAULT_CUSTOMER_TOKEN_DAYS"]
DELIVERY_DAYS: int = _values["KEYVAULT_DELIVERY_DAYS"]
NOTICE_DAYS: int = _values["KEYVAULT_NOTICE_DAYS"]
LEASE_DAYS: int = _values["KEYVAULT_LEASE_DAYS"]
CHANGE_DAYS: int = _values["KEYVAULT_CHANGE_DAYS"]
IS_VAULT: bool = _values["KEYVAULT_BACKEND"] == "vault"
IDENTITY_PROVIDER = find_identity_provider(_values, DATA_DIR)
REGION_SOURCE: str = _values["KEYVAULT_REGION_SOURCE"]
REGION_TOKEN = Plaintext(_values["KEYVAULT_REGION_TOKEN"])
REGION_CA_FILE: str = _values["KEYVAULT_REGION_CACERT"]
MASTER_KEY: str = _values["KEYVAULT_MASTER_KEY"]
VAULT_ADDRESS: str = _values["VAULT_ADDR"]
VAULT_CA_FILE = Path(_values["VAULT_CACERT"]) if _values["VAULT_CACERT"] else None
VAULT_PREFIX: str = _values["KEYVAULT_VAULT_PREFIX"]
VAULT_AUTH: str = _values["KEYVAULT_VAULT_AUTH"]
VAULT_CREDENTIALS_DIR = DATA_DIR / _values["KEYVAULT_VAULT_CREDENTIALS_DIR"]
VAULT_JWT_FILE = Path(_values["KEYVAULT_VAULT_JWT_FILE"])
BROKER_URL: str = _values["KEYVAULT_BROKER_URL"] or REDIS_URL or "filesystem://localhost"
IS_FILE_BROKER = BROKER_URL.startswith("filesystem:")
BROKER_DIR = DATA_DIR / "broker"

# --- Django -----------------------------------------------------------------------------------------------

IS_SESSION_KEY_SET = bool(_values["KEYVAULT_SECRET_KEY"])
SECRET_KEY = _values["KEYVAULT_SECRET_KEY"] or read_or_make_secret(DATA_DIR / "django.key")
# The former key verifies sessions from before the last rotation. None of them is left after a session's lifetime.
_fallback = _values["KEYVAULT_SECRET_KEY_FALLBACK"]
if not IS_SESSION_KEY_SET:
    if _fallback:
        raise ImproperlyConfigured("KEYVAULT_SECRET_KEY_FALLBACK: without effect; set KEYVAULT_SECRET_KEY, too")
    _fallback = find_recent_secret(DATA_DIR / "django.key.previous", SESSION_SECONDS)
SECRET_KEY_FALLBACKS = [_fallback] if _fallback else []
DEBUG = False
ALLOWED_HOSTS = sorted(
    {
        "127.0.0.1",
        "localhost",
        "[::1]",
        *_values["KEYVAULT_ALLOWED_HOSTS"],
        *(urlsplit(url).hostname or "" for url in (ORIGIN, *BASE_URLS.values())),
    }
)
ROOT_URLCONF = "keyvault.project.urls"
WSGI_APPLICATION = "keyvault.project.wsgi.application"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
AUTH_USER_MODEL = "keyvault.Operator"
USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en"
APPEND_SLASH = False

INSTALLED_APPS = [
    # First: its commands replace those of Django's that would bypass the services.
    "keyvault",
    "keyvault.project.console.OperatorsConfig",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "keyvault.project.console.ConsoleConfig",
    # Its models and WebAuthn functions. Its views have no route.
    "allauth.account",
    "allauth.mfa",
    "allauth.socialaccount",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "rotation",
]
MIDDLEWARE = [
    "keyvault.api.middleware.RequestMiddleware",
    "django.middleware.security.SecurityMiddleware",
    "keyvault.api.middleware.EnvironmentMiddleware",
    "keyvault.api.middleware.PlaneMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "keyvault.admin.framework.middleware.ConsoleSessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "keyvault.admin.framework.middleware.ConsoleCsrfMiddleware",
    "keyvault.admin.framework.middleware.ConsoleAuthenticationMiddleware",
    "keyvault.admin.framework.middleware.ConsoleMessageMiddleware",
    # allauth requires it by this name, and reads the request from the context that it sets.
    "allauth.account.middleware.AccountMiddleware",
    "keyvault.admin.framework.middleware.ConsoleAccessMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

try:
    DATABASES = {
        "default": dj_database_url.parse(
            _values["KEYVAULT_DATABASE_URL"] or f"sqlite:///{DATA_DIR}/keyvault.sqlite3",
            conn_max_age=60,
            conn_health_checks=True,
        )
    }
except ValueError:
    raise ImproperlyConfigured(
        "KEYVAULT_DATABASE_URL: cannot be read; in a password write # as %23, / as %2F, and so on"
    ) from None
if REGION_SOURCE:
    if _values["KEYVAULT_DATABASE_URL"]:
        raise ImproperlyConfigured(
            "KEYVAULT_REGION_SOURCE: a regional verifier needs no KEYVAULT_DATABASE_URL; unset it"
        )
    if not _values["KEYVAULT_REGION_TOKEN"]:
        raise ImproperlyConfigured("KEYVAULT_REGION_SOURCE: a regional verifier needs KEYVAULT_REGION_TOKEN")
    DATABASES = {"default": {"ENGINE": "django.db.backends.dummy"}}
elif DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":
    ensure_private_file(Path(DATABASES["default"]["NAME"]))
    # IMMEDIATE: a writing transaction takes the write lock at its start, so that its reads stay valid until it writes.
    # FULL: an acknowledged commit survives a power cut.
    DATABASES["default"]["OPTIONS"] = {
        "transaction_mode": "IMMEDIATE",
        "timeout": 20,
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA foreign_keys=ON;",
    }
else:
    # Connect to the primary only, because a standby lags behind. The TCP limits detect a server that is gone: by
    # default TCP waits a quarter of an hour, or two hours on an idle connection. A server that is busy with a long
    # query still acknowledges. The URL's own options take precedence.
    DATABASES["default"]["OPTIONS"] = {
        "target_session_attrs": "read-write",
        "connect_timeout": 5,
        "tcp_user_timeout": 2_000,
        "keepalives_idle": 5,
        "keepalives_interval": 1,
        "keepalives_count": 3,
        **DATABASES["default"].get("OPTIONS", {}),
    }

AUTHENTICATION_BACKENDS = ["keyvault.admin.framework.sign_in.SessionBackend"]
AUTH_PASSWORD_VALIDATORS = [
    {
        "NAME": "django.contrib.auth.password_validation.MinimumLengthValidator",
        "OPTIONS": {"min_length": 12},
    },
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]

# --- mail: alarms to operators, see `services.alarm_messages` ----------------------------------------------

SMTP_SERVER: SmtpServer | None = _values["KEYVAULT_SMTP_URL"]
DEFAULT_FROM_EMAIL: str = _values["KEYVAULT_ALARM_SENDER"]
EMAIL_TIMEOUT = 10

# --- allauth: second factors of operators -----------------------------------------------------------------

ACCOUNT_EMAIL_VERIFICATION = "none"
ACCOUNT_SIGNUP_FIELDS = ["username*"]
# `services.limits.sign_in_attempts` counts failures. allauth's own limits would count in the cache of one process.
ACCOUNT_RATE_LIMITS = False
MFA_RATE_LIMITS = False
MFA_ADAPTER = "keyvault.services.sessions.second_factor_adapter.SecondFactorAdapter"
MFA_SUPPORTED_TYPES = ["totp", "webauthn", "recovery_codes"]
MFA_TOTP_ISSUER = "Keyvault"
# A code of the previous or the next 30 seconds is accepted too (RFC 6238, section 5.2).
MFA_TOTP_TOLERANCE = 1
MFA_RECOVERY_CODE_COUNT = 10
MFA_RECOVERY_CODE_DIGITS = 8

# The provider comes from IDENTITY_PROVIDER.
SOCIALACCOUNT_ADAPTER = "keyvault.admin.account.single_sign_on.SingleSignOnAdapter"

# --- sessions and cookies ---------------------------------------------------------------------------------

_https = ORIGIN.startswith("https://")
SESSION_ENGINE = "keyvault.services.sessions.store"
# The session's row decides when it ends, so the cookie has no date of its own.
SESSION_EXPIRE_AT_BROWSER_CLOSE = True
# For the cookie that binds a single sign-on to its browser.
SESSION_COOKIE_AGE = SESSION_SECONDS
SESSION_COOKIE_HTTPONLY = True
# A link from an alarm or a mail opens the page, and the identity provider sends the browser back from another site.
# Forms of other sites get neither this cookie nor the strict one below.
SESSION_COOKIE_SAMESITE = "Lax"
CSRF_COOKIE_SAMESITE = "Strict"
# In a cookie, not in the session: an anonymous request for the sign-in page must not create a session row.
CSRF_COOKIE_HTTPONLY = True
CSRF_COOKIE_AGE = None
# Over plain http the origin is this machine (see `configuration`). A browser would not return a Secure cookie there.
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = _https
SESSION_COOKIE_NAME = "__Host-session" if _https else "session"
CSRF_COOKIE_NAME = "__Host-csrf" if _https else "csrf"
# Its path is the console's; a __Host- cookie requires the path "/".
DEVICE_COOKIE = "__Secure-device" if _https else "device"
SECURE_HSTS_SECONDS = 31_536_000 if _https else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = _https
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
CSRF_TRUSTED_ORIGINS = [ORIGIN]
CSRF_FAILURE_VIEW = "keyvault.project.views.csrf_failure"
LOGIN_URL = "admin:login"

DATA_UPLOAD_MAX_MEMORY_SIZE = 65_536
FILE_UPLOAD_HANDLERS = ["django.core.files.uploadhandler.MemoryFileUploadHandler"]

STATIC_URL = "/static/"
STATIC_ROOT = ensure_private_directory(DATA_DIR / "static")
WHITENOISE_USE_FINDERS = True
WHITENOISE_AUTOREFRESH = False

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [],
    "DEFAULT_PERMISSION_CLASSES": ["keyvault.api.permissions.DeniedByDefault"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_CONTENT_NEGOTIATION_CLASS": "keyvault.api.negotiation.AlwaysJSON",
    "DEFAULT_PARSER_CLASSES": ["keyvault.api.parsers.StrictJSONParser"],
    "EXCEPTION_HANDLER": "keyvault.api.exceptions.handle_exception",
    # OPTIONS would disclose names and docstrings of views: it is answered like any unsupported method.
    "DEFAULT_METADATA_CLASS": None,
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "UNAUTHENTICATED_USER": None,
    "URL_FORMAT_OVERRIDE": None,
}

SPECTACULAR_SETTINGS = {
    "TITLE": "Keyvault",
    "DESCRIPTION": "Issues, rotates, revokes and verifies the API keys of a merchant payments platform.",
    "VERSION": "1",
    "OAS_VERSION": "3.1.0",
    "PREPROCESSING_HOOKS": ["keyvault.api.openapi_unrouted.add_unrouted"],
    "POSTPROCESSING_HOOKS": ["keyvault.api.openapi.finish"],
    "ENUM_GENERATE_CHOICE_DESCRIPTION": False,
}

# --- Celery (namespace CELERY_): messages carry ids only and are wake-ups; the database rows are authoritative

CELERY_BROKER_URL = BROKER_URL
if IS_FILE_BROKER:
    CELERY_BROKER_TRANSPORT = "keyvault.project.file_broker:FileTransport"
    CELERY_BROKER_TRANSPORT_OPTIONS = prepare_folder(BROKER_DIR)
elif BROKER_URL.startswith(("redis://", "rediss://")):
    CELERY_BROKER_TRANSPORT = "keyvault.project.redis_broker:RedisTransport"
    if BROKER_URL.startswith("rediss:"):
        # Kombu derives TLS from the name of its own transport. Parameters of the URL (`ssl_ca_certs`) override this.
        CELERY_BROKER_USE_SSL = {"ssl_cert_reqs": ssl.CERT_REQUIRED}
    # Seconds. Without them a worker does not stop while it waits: minutes for the former address of a Redis that has
    # moved, forever for one that does not reply. A wait for a message ends after 1 s. A timeout can lose or repeat a
    # message, which does no harm: messages only wake work that the database lists.
    CELERY_BROKER_TRANSPORT_OPTIONS = {"socket_connect_timeout": 5, "socket_timeout": 5}
elif BROKER_URL.startswith(("amqp://", "amqps://", "pyamqp://")):
    # Seconds. Without them a process waits forever for a broker that accepts its connection and then does not reply.
    CELERY_BROKER_TRANSPORT_OPTIONS = {"read_timeout": 5, "write_timeout": 5}
# Otherwise Celery closes the database connection after each task. `project.celery` closes only broken and old ones.
CELERY_DB_REUSE_MAX = sys.maxsize
CELERY_TASK_IGNORE_RESULT = True
CELERY_RESULT_EXPIRES = None
# A message is acknowledged before its task runs, so a task that kills its worker does not kill the next one.
CELERY_TASK_ACKS_LATE = False
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_TASK_SERIALIZER = "json"
CELERY_ACCEPT_CONTENT = ["json"]
CELERY_TASK_SOFT_TIME_LIMIT = 60
CELERY_TASK_TIME_LIMIT = 90
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
# Never give up on a broker: the work is in the rows, and waits there.
CELERY_BROKER_CONNECTION_MAX_RETRIES = None
# Otherwise the control mailboxes of killed workers stay in the broker.
CELERY_WORKER_ENABLE_REMOTE_CONTROL = False
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_WORKER_SEND_TASK_EVENTS = False
CELERY_TIMEZONE = "UTC"
# Each environment has its own queues, because a worker serves only some environments.
_queues = ("emergencies", "rotations", "ticks", "issuance", "webhooks", "maintenance")
CELERY_TASK_QUEUES = [
    Queue(f"{name}.{environment}", Exchange(EXCHANGE), routing_key=f"{name}.{environment}")
    for name in _queues
    for environment in ENVIRONMENTS
]
CELERY_TASK_DEFAULT_QUEUE = f"maintenance.{ENVIRONMENTS[0]}"
CELERY_TASK_DEFAULT_EXCHANGE = EXCHANGE
CELERY_TASK_DEFAULT_ROUTING_KEY = CELERY_TASK_DEFAULT_QUEUE
# Beat stores no state: after a restart each entry is due after its interval, and its task finds the due rows.
CELERY_BEAT_SCHEDULER = "keyvault.project.celery:SettingsScheduler"
CELERY_BEAT_MAX_LOOP_INTERVAL = 1
# Jobs by name: task, interval in seconds, queue. The task gets the environment.
_jobs = {
    # A queue of their own: ticks that accumulate while no worker runs must not delay an emergency.
    "dispatch-due-rotations": ("rotation.tasks.dispatch_due", 1.0, "ticks"),
    "advance-campaigns": ("rotation.tasks.advance_campaigns", 5.0, "maintenance"),
    "begin-scheduled-rotations": ("rotation.tasks.begin_scheduled", 30.0, "maintenance"),
}
# These do the work of all environments that their worker serves, once for the messages of all its queues.
_shared_jobs = {
    "deliver-webhooks": ("keyvault.tasks.deliver_webhooks", 2.0, "webhooks"),
    "issue-approved": ("keyvault.tasks.issue_approved", 2.0, "issuance"),
    "run-maintenance": ("keyvault.tasks.run_maintenance", 5.0, "maintenance"),
    "forget-expired-rows": ("keyvault.tasks.forget_expired_rows", 30.0, "maintenance"),
    "forget-pending-copies": ("rotation.tasks.forget_pending", 30.0, "maintenance"),
    "total-usage": ("keyvault.tasks.total_usage", 60.0, "maintenance"),
    "watch-backend": ("keyvault.tasks.watch_backend", 15.0, "maintenance"),
    "sign-checkpoints": ("keyvault.tasks.sign_checkpoints", 60.0, "maintenance"),
    # The task checks whether the nightly run is due.
    "reconcile-backend": ("keyvault.tasks.reconcile_backend", 600.0, "maintenance"),
}
if ALARM_CHANNELS:
    _shared_jobs["send-alarms"] = ("keyvault.tasks.send_alarms", 5.0, "webhooks")
# The only worker of a file broker serves all environments: one message without an environment does the same work.
_sent_once = {"dispatch-due-rotations", "advance-campaigns", *_shared_jobs} if IS_FILE_BROKER else set[str]()
CELERY_BEAT_SCHEDULE = {
    f"{name}-{environment}": {
        "task": task,
        "schedule": seconds,
        "args": () if name in _sent_once else (environment,),
        "options": {"queue": f"{queue}.{environment}"},
    }
    for name, (task, seconds, queue) in {**_jobs, **_shared_jobs}.items()
    for environment in (ENVIRONMENTS[:1] if name in _sent_once else ENVIRONMENTS)
}

# --- Logs: one JSON object per line, redacted as the last step before it is written ------------------------

_CLIENT_ERRORS = ("DisallowedHost", "RequestDataTooBig", "TooManyFieldsSent")
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"json": {"()": "keyvault.project.logs.RedactedJSONFormatter"}},
    "handlers": {
        "stderr": {"class": "logging.StreamHandler", "formatter": "json"},
    },
    "root": {"handlers": ["stderr"], "level": _values["KEYVAULT_LOG_LEVEL"]},
    # Django's own handlers would mail or print settings, headers and locals of a failed request.
    "loggers": {
        "django": {"handlers": [], "propagate": True},
        "django.server": {"handlers": [], "propagate": True},
        "django.request": {"handlers": [], "propagate": True, "level": "ERROR"},
        # Django logs these as errors with a traceback, though any client can cause them. `keyvault.requests` logs them
        # at INFO.
        **{f"django.security.{name}": {"level": "CRITICAL"} for name in _CLIENT_ERRORS},
        # Celery logs every task twice, each second or two. Tasks log their own effects.
        "celery.worker.strategy": {"level": "WARNING"},
        "celery.app.trace": {"level": "WARNING"},
        "celery.beat": {"level": "WARNING"},
    },
}
