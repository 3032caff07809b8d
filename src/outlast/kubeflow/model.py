"""The model of `kubeflow.yaml`: every field with its default, its documentation and the rules between fields.

The text below a field is what users read about it. There is no way to write a dashboard without authentication.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from outlast import contract, units
from outlast.spec import fields, validation
from outlast.spec.document import Place
from outlast.spec.validation import Checked

PLACEHOLDER = re.compile(
    r"change.?me|fix.?me|\btodo\b|\btbd\b|placeholder|replace[-_. ]?(me|this|with)(?![a-z])|\byour[-_.]"
    r"|<[^>]*>|\$[({]|x{4,}|(?<![a-z0-9])xxx(?![a-z0-9])|\.\.\.|\*{2,}",
    re.IGNORECASE,
)
"""A value that somebody meant to fill in."""
_SECRET = re.compile(r"SECRET|PASSW|TOKEN(?!IZ)|CREDENTIAL|(API|ACCESS|PRIVATE)_?KEY", re.IGNORECASE)
"""A variable that holds a credential; TOKENIZERS_PARALLELISM holds none."""
_COUNTED = re.compile(
    r"cpu|memory|storage|ephemeral-storage|(requests|limits)\.(cpu|memory|ephemeral-storage)|requests\.storage|pods|services"
    r"|services\.(loadbalancers|nodeports)|secrets|configmaps|persistentvolumeclaims|replicationcontrollers|resourcequotas"
    r"|hugepages-\w+|requests\.hugepages-\w+|count/[a-z0-9.-]+|requests\.[a-z0-9.-]+/[A-Za-z0-9._-]+"
    r"|[a-z0-9.-]+\.storageclass\.storage\.k8s\.io/(requests\.storage|persistentvolumeclaims)"
)
"""What a quota of Kubernetes counts: of devices their requests alone. https://kubernetes.io/docs/concepts/policy/resource-quotas/"""
_ARN = re.compile(r"arn:(aws|aws-cn|aws-us-gov):([a-z-]+):([a-z0-9-]*):([0-9]{12}):(.+)")
_DNS = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_HOST = re.compile(rf"({_DNS}\.)+[a-z][a-z0-9-]{{0,61}}[a-z0-9]")
_COGNITO_HOST = re.compile(r"([^.]+)\.auth(-fips)?\.([a-z0-9-]+)\.amazoncognito\.com")
_LABEL = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_RESERVED_PROFILES = (
    "default",
    "kubeflow",
    "istio-system",
    "kube-system",
    "kube-public",
    "kube-node-lease",
    "cert-manager",
    "auth",
)
POD_SECURITY = "pod-security.kubernetes.io/enforce"


@dataclass(frozen=True)
class Arn:
    """An Amazon Resource Name, in parts."""

    partition: str
    service: str
    region: str
    account: str
    resource: str

    @classmethod
    def parse(cls, text: str) -> Arn:
        """The parts; raises ValueError for what is none."""
        found = _ARN.fullmatch(text)
        if not found:
            raise ValueError("must be an ARN: arn:aws:SERVICE:REGION:ACCOUNT:RESOURCE, the account with 12 digits")
        return cls(*found.groups())


def _filled(value: str) -> str:
    if found := PLACEHOLDER.search(value):
        raise ValueError(f"is not filled in ({found[0]}); write the value itself")
    return value


def _certificate(value: str) -> str:
    arn = Arn.parse(_filled(value))
    if arn.service != "acm" or not re.fullmatch(r"certificate/[A-Za-z0-9-]{8,64}", arn.resource) or not arn.region:
        raise ValueError("must be the ARN of a certificate of ACM: arn:aws:acm:us-west-2:123456789012:certificate/0a1b2c3d-...")
    return value


def _pool(value: str) -> str:
    arn = Arn.parse(_filled(value))
    found = re.fullmatch(r"userpool/([a-z0-9-]+)_[A-Za-z0-9]{1,40}", arn.resource)
    if arn.service != "cognito-idp" or not found:
        raise ValueError(
            "must be the ARN of a user pool: arn:aws:cognito-idp:us-west-2:123456789012:userpool/us-west-2_Ab1Cd2Ef3"
        )
    if found[1] != arn.region:
        raise ValueError(f"names region {arn.region} and a user pool of {found[1]}; copy it anew from Cognito")
    return value


def _role(value: str) -> str:
    if not value:
        return value
    arn = Arn.parse(_filled(value))
    if arn.service != "iam" or arn.region or not re.fullmatch(r"role/[A-Za-z0-9_+=,.@/-]{1,512}", arn.resource):
        raise ValueError("must be the ARN of a role: arn:aws:iam::123456789012:role/notebooks")
    return value


def _host(value: str) -> str:
    if "://" in value or "/" in value:
        raise ValueError("must be a host name alone, without https:// and path, e.g. kubeflow.example.com")
    if not _HOST.fullmatch(_filled(value)) or len(value) > 253:
        raise ValueError("must be a host name in lower case, e.g. kubeflow.example.com")
    return value


def _pool_domain(value: str) -> str:
    if found := _COGNITO_HOST.fullmatch(value.removeprefix("https://").rstrip("/")):
        raise ValueError(f"must be the prefix alone for a domain of Cognito's own; write {found[1]}")
    if "." in value or "/" in value:
        return _host(value)
    if not re.fullmatch(_DNS, _filled(value)):
        raise ValueError("must be a prefix (lower-case letters, digits and dashes, at most 63) or a host name of your own")
    if taken := re.search("aws|amazon|cognito", value):
        raise ValueError(f"contains {taken[0]}, which Cognito allows in no prefix; give the one that the user pool has")
    return value


def _image(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*", _filled(value)):
        raise ValueError("must be an image, e.g. ghcr.io/outlast/outlast:0.1-notebook")
    if not re.search(r"(:[A-Za-z0-9_][A-Za-z0-9._-]*|@sha256:[0-9a-f]{64})$", value.rpartition("/")[2]):
        raise ValueError("has no tag; give one, so that a notebook started again is the same: .../outlast:0.1-notebook")
    return value


def _variables(value: dict[str, str]) -> dict[str, str]:
    broken: list[tuple[Place, str]] = []
    for name, text in value.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            broken.append(((name,), f"env.{name} is not a name for an environment variable; use letters, digits and _"))
        elif _SECRET.search(name) and not text.startswith("/"):
            broken.append(((name,), f"env.{name} looks like a secret, which everybody in the namespace could read; use secret"))
    if broken:
        raise validation.Broken(broken)
    return value


def _quantities(value: dict[str, str | int | float]) -> dict[str, str | int | float]:
    broken: list[tuple[Place, str]] = []
    for name, each in value.items():
        if not _COUNTED.fullmatch(name):
            right = f"write requests.{name}" if "/" in name else "write e.g. cpu, memory or requests.nvidia.com/gpu"
            broken.append(((name,), f"quota.{name} limits nothing; {right}"))
        try:
            if units.quantity(each) < 0 or str(each) != str(each).strip():
                raise ValueError
        except ValueError:
            broken.append(((name,), f"quota.{name} ({each}) is not a quantity; write 64 or 512Gi"))
    if broken:
        raise validation.Broken(broken)
    return value


def _labels(value: dict[str, str]) -> dict[str, str]:
    broken: list[tuple[Place, str]] = []
    for name, text in value.items():
        if not _LABEL.fullmatch(name):
            broken.append(((name,), f"labels.{name} is no name of a label; write e.g. example.com/team"))
        elif not re.fullmatch(fields.LABEL_VALUE, text) or len(text) > 63:
            broken.append(((name,), f"labels.{name} ({text}) must be at most 63 letters, digits, -, _ and ."))
        elif name.partition("/")[0].endswith(contract.GROUP):
            broken.append(((name,), f"labels.{name} is Outlast's own; choose another name"))
        elif name == POD_SECURITY:
            broken.append(((name,), f"labels.{name} has a field of its own; write podSecurity: {text}"))
    if broken:
        raise validation.Broken(broken)
    return value


Name = Annotated[str, fields.label(63)]
RoleArn = Annotated[str, AfterValidator(_role)]
Host = Annotated[str, AfterValidator(_host)]
Image = Annotated[str, AfterValidator(_image)]


class Cognito(Checked):
    """The user pool whose people may open the dashboard."""

    instead: ClassVar = {
        "appClientId": "cognitoAppClientId",
        "clientId": "cognitoAppClientId",
        "CognitoAppClientId": "cognitoAppClientId",
        "userPoolArn": "cognitoUserPoolArn",
        "userPoolARN": "cognitoUserPoolArn",
        "CognitoUserPoolArn": "cognitoUserPoolArn",
        "userPoolDomain": "cognitoUserPoolDomain",
        "CognitoUserPoolDomain": "cognitoUserPoolDomain",
    }

    cognito_app_client_id: Annotated[
        str,
        AfterValidator(_filled),
        fields.Pattern(r"[A-Za-z0-9_+]{8,128}", "must be the id of an app client: letters and digits, as Cognito shows it"),
    ]
    """Id of the app client. It needs a secret, and the callback URL `https://DOMAIN/oauth2/idpresponse`."""
    cognito_user_pool_arn: Annotated[str, AfterValidator(_pool)]
    """ARN of the user pool, in the same account as the certificate: a load balancer takes none of another."""
    cognito_user_pool_domain: Annotated[str, AfterValidator(_pool_domain)]
    """Domain of the user pool's login page: the prefix alone for one of Cognito's own, the whole host name for one of yours."""

    @property
    def pool(self) -> Arn:
        """The user pool's ARN in parts."""
        return Arn.parse(self.cognito_user_pool_arn)

    @property
    def pool_id(self) -> str:
        """`us-west-2_Ab1Cd2Ef3`."""
        return self.pool.resource.partition("/")[2]

    @property
    def host(self) -> str:
        """Host name of the login page."""
        domain = self.cognito_user_pool_domain
        auth = "auth-fips" if self.pool.partition == "aws-us-gov" else "auth"
        return domain if "." in domain else f"{domain}.{auth}.{self.pool.region}.amazoncognito.com"


class Spawner(Checked):
    """Images that people can choose when they make a notebook."""

    instead: ClassVar = {"options": "images", "imageGroup": "images", "image": "images, a list"}

    images: tuple[Image, ...] = ()
    """Images with JupyterLab, such as `ghcr.io/outlast/outlast:0.1-notebook`."""
    image_group_one: tuple[Image, ...] = ()
    """Images with VS Code."""
    image_group_two: tuple[Image, ...] = ()
    """Images with RStudio."""

    @property
    def options(self) -> dict[str, tuple[str, ...]]:
        """Images by their section of `spawnerFormDefaults`."""
        all_ = {"image": self.images, "imageGroupOne": self.image_group_one, "imageGroupTwo": self.image_group_two}
        return {section: images for section, images in all_.items() if images}


class PodDefault(Checked):
    """Credentials and variables that people can switch on for a notebook: a PodDefault in the namespace of each profile."""

    instead: ClassVar = {"description": "desc", "role": "roleArn", "serviceAccount": "roleArn: the account is made for it"}

    name: Name
    """Its name, and that of the label by which pods ask for it."""
    desc: fields.Text
    """What people read about it in the form."""
    secret: Annotated[str, fields.object_name(253)] = ""
    """A Secret of the namespace, whose keys become environment variables. It must be there: Outlast makes no secrets."""
    role_arn: RoleArn = ""
    """Role of IAM for the pods (IRSA): a ServiceAccount of this name is made, with the rights of `default-editor`."""
    env: Annotated[dict[str, str], AfterValidator(_variables)] = Field({})
    """Environment variables. Everybody who may look at the namespace can read them."""

    def rules(self) -> Iterator[tuple[Place, str]]:
        if not (self.secret or self.role_arn or self.env):
            yield (), f"podDefaults: {self.name} gives nothing; add secret, roleArn or env"
        if self.role_arn and self.name in ("default", "default-editor", "default-viewer", "spark"):
            yield ("name",), f"podDefaults: the ServiceAccount {self.name} is there for something else; choose another name"


class Profile(Checked):
    """A profile of Kubeflow: a person or a team with a namespace, in which notebooks, jobs and Spark run."""

    instead: ClassVar = {"resourceQuotaSpec": "quota", "namespace": "name", "email": "owner"}

    name: Name
    """Name of the profile and of its namespace."""
    owner: Annotated[fields.Text, AfterValidator(_filled)]
    """Who owns it, as Cognito names them: the e-mail address. Case matters."""
    quota: Annotated[dict[str, str | int | float], Field(min_length=1), AfterValidator(_quantities)]
    """The most that the namespace may use: `{cpu: 64, memory: 256Gi, requests.nvidia.com/gpu: 8}`."""
    role_arn: RoleArn = ""
    """Role of IAM that all pods of `default-editor` have (IRSA), notebooks among them."""
    pod_security: Literal["", "privileged", "baseline", "restricted"] = ""
    """Pod Security that the namespace enforces. Default: what Kubeflow sets."""
    labels: Annotated[dict[str, str], AfterValidator(_labels)] = Field({})
    """More labels of the namespace. Kubeflow replaces none that is there."""
    annotations: dict[str, str] = Field({})
    """Annotations of the namespace."""

    def rules(self) -> Iterator[tuple[Place, str]]:
        if self.name in _RESERVED_PROFILES:
            yield ("name",), f"profiles: {self.name} is a namespace of the cluster or of Kubeflow itself; choose another name"
        if "owner" in self.annotations:
            yield ("annotations", "owner"), "profiles: annotations.owner is Kubeflow's; write owner"


class Kubeflow(Checked):
    """What Outlast adds to a Kubeflow that is there, and how its dashboard is reached."""

    instead: ClassVar = {
        "certArn": "certificateArn",
        "authentication": "cognito; there is no dashboard without",
        "auth": "cognito; there is no dashboard without",
        "images": "spawner: {images: [...]}",
        "loadBalancerScheme": "scheme",
    }

    cluster: Annotated[str, fields.label(100)]
    """Name of the cluster on EKS."""
    region: Annotated[str, fields.Pattern(r"[a-z]{2}(-[a-z]+)+-[0-9]", "must be a region of AWS, e.g. us-west-2")]
    """Region of the cluster."""
    domain: Host
    """Host name of the dashboard."""
    certificate_arn: Annotated[str, AfterValidator(_certificate)]
    """ARN of the certificate in ACM. It must be of the cluster's region, where the load balancer is."""
    cognito: Cognito
    """Who may open the dashboard."""
    scheme: Literal["internet-facing", "internal"] = "internet-facing"
    """Whether the load balancer has public addresses."""
    node_group: Annotated[str, fields.object_name(63)] = ""
    """Node group on which Kubeflow itself runs, as eksctl names it; rendered by `--values`. Default: any."""
    spawner: Spawner = Spawner()
    """Images that people can choose when they make a notebook."""
    pod_defaults: tuple[PodDefault, ...] = ()
    """Credentials and variables that people can switch on for a notebook, in every profile."""
    profiles: tuple[Profile, ...] = ()
    """Profiles to make."""

    @property
    def certificate(self) -> Arn:
        """The certificate's ARN in parts."""
        return Arn.parse(self.certificate_arn)

    @property
    def callback(self) -> str:
        """The URL to which Cognito sends people back after the login. Fixed by the load balancer."""
        return f"https://{self.domain}/oauth2/idpresponse"

    def rules(self) -> Iterator[tuple[Place, str]]:
        certificate, pool = self.certificate, self.cognito.pool
        if certificate.region != self.region:
            yield (
                ("certificateArn",),
                f"certificateArn is of {certificate.region}, and the load balancer is in {self.region}; "
                f"request the certificate in {self.region}, or correct region",
            )
        if (pool.partition, pool.account) != (certificate.partition, certificate.account):
            yield (
                ("cognito", "cognitoUserPoolArn"),
                f"cognitoUserPoolArn is of account {pool.account}, and the certificate of {certificate.account}; "
                "a load balancer takes both from its own account",
            )
        if self.cognito.host == self.domain:
            yield ("domain",), f"domain ({self.domain}) is that of the login page; give the dashboard a host name of its own"
        for list_, names in (
            ("podDefaults", [each.name for each in self.pod_defaults]),
            ("profiles", [p.name for p in self.profiles]),
        ):
            for index, name in enumerate(names):
                if name in names[:index]:
                    yield (list_, index, "name"), f"{list_}: {name} is given twice; keep one"
